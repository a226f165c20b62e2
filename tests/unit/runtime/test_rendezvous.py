"""Which process of a user hosts a master: one, and never a dead one."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ringfold.config import rendezvous_directory
from ringfold.errors import ConfigError
from ringfold.runtime.rendezvous import Rendezvous

HOLD = """
import sys
from pathlib import Path
from ringfold.runtime.rendezvous import Rendezvous
meeting = Rendezvous(Path(sys.argv[1]), "run")
assert meeting.take()
meeting.announce("127.0.0.1:7")
print("host", flush=True)
sys.stdin.read()
"""


def test_one_of_two_is_the_host_and_the_other_learns_where(tmp_path: Path) -> None:
    one, two = Rendezvous(tmp_path / "d", "run"), Rendezvous(tmp_path / "d", "run")
    assert one.take()
    assert not two.take()
    assert two.address() == "", "it has not announced it yet"
    one.announce("127.0.0.1:7")
    assert two.address() == "127.0.0.1:7"
    one.withdraw()
    assert two.address() == ""
    one.close()
    assert two.take()
    two.close()
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_what_a_dead_host_left_is_not_believed(tmp_path: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "d")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"host\n"
        late = Rendezvous(tmp_path / "d", "run")
        assert not late.take()
        assert late.address() == "127.0.0.1:7"
        host.kill()
        host.wait()
        assert late.address() == ""
        assert late.take()
        late.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    asleep, wake = os.pipe()
    host, late = Rendezvous(tmp_path / "d", "run"), Rendezvous(tmp_path / "d", "run")
    assert host.take()
    child = os.fork()
    if child == 0:
        os.close(wake)
        os.read(asleep, 1)
        os._exit(0)
    host.close()
    assert late.take()
    late.close()
    os.close(wake)
    os.close(asleep)
    assert os.waitpid(child, 0)[1] == 0


def test_a_directory_that_others_can_use_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "d"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="not a private directory of this user: remove it, or chmod 700 it"):
        Rendezvous(shared, "run")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a private directory"):
        Rendezvous(link, "run")


def test_the_directory_is_the_users_own() -> None:
    assert rendezvous_directory({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/ringfold-hosts")
    assert rendezvous_directory({}) == Path(f"/tmp/ringfold-hosts-{os.geteuid()}")
