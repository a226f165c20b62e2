"""Two hosts with two paths between them: a path that is cut in mid-op costs no op and no epoch, and is used again."""

import pytest

from ringfold.tools import lab as labs
from ringfold.tools.bench import multipath
from ringfold.tools.lab import Lab

pytestmark = pytest.mark.skipif(labs.missing() is not None, reason=str(labs.missing()))

SIZE = 3 << 20


def test_an_op_survives_the_path_that_carries_most_of_it() -> None:
    paths = [labs.Path(name="path0", up=60.0), labs.Path(name="path1", up=20.0), labs.Path(name="control")]
    with Lab(hosts=2, paths=paths) as lab, multipath._peers(lab, 2) as cluster:
        _, before = multipath._op(cluster, SIZE)
        multipath._request(cluster, {"do": "op", "size_bytes": SIZE})
        lab.cut(0)
        _, replies = multipath._result(cluster)  # verified, and in the first attempt
        lab.restore(0)
        assert multipath._used_again(cluster, 0) is not None
    for name, reply in replies.items():
        assert reply["epoch"] == before[name]["epoch"]
        assert reply["reissued"] > 0
        assert all(sent > 0 for sent in before[name]["path_bytes"][:2])
