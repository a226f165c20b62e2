"""Which calls are legal from which thread: docs/guides/threads.md, on real peers."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from programs import ProgramCluster, ProgramContext, by_id

WORLD = 2


def _in_threads(bodies: list[Callable[[], None]]) -> None:
    """Run every body in a thread of its own, wait for all, and raise the first failure."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _gather(me: ProgramContext) -> Any:  # noqa: ANN401 - a communicator
    run = me.join(op_timeout_s=30.0)
    while run.group_size < WORLD:
        run.update_topology(min_world=WORLD)
    return run


def test_threads_with_tags_of_their_own_call_what_they_like(cluster: ProgramCluster) -> None:
    """Blocking and handled ops of many sizes, at the same time, in as many threads as tags."""
    cluster.start_master()
    peers = cluster.start_program(reduce_in_many_threads, WORLD)
    for peer in peers:
        peer.wait_success(60)


def reduce_in_many_threads(me: ProgramContext) -> None:
    with _gather(me) as run:

        def work(tag: int) -> None:
            for number in range(30):
                array = np.full(1 + tag * 2_500, float(number + run.rank))
                info = run.all_reduce(array, tag=tag) if tag % 2 else run.all_reduce_async(array, tag=tag).wait(30)
                assert len(info.contributors) == WORLD
                assert (array == 2 * number + 1).all()

        _in_threads([lambda tag=tag: work(tag) for tag in range(8)])  # type: ignore[misc]
        run.barrier()


def test_a_tag_carries_one_op_at_a_time(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(use_one_tag_twice, WORLD)
    for peer in peers:
        peer.expect("joined")
    for peer in peers:
        if peer.reports("joined")[0]["rank"] == 0:
            for how in ("blocking", "handled"):
                refused = peer.expect("refused", how=how)
                assert refused["error"] == "UsageError"
                assert "tag" in refused["message"]
    for peer in peers:
        peer.send()
    for peer in peers:
        assert peer.expect("reduced")["contributors"] == WORLD
        peer.wait_success()


def use_one_tag_twice(me: ProgramContext) -> None:
    with _gather(me) as run:
        me.report("joined", rank=run.rank)
        if run.rank:
            me.receive()
            me.report("reduced", contributors=len(run.all_reduce(np.ones(50_000), tag=5).contributors))
            return
        started, infos = threading.Event(), []

        def first() -> None:
            started.set()
            infos.append(run.all_reduce(np.ones(50_000), tag=5))

        thread = threading.Thread(target=first)
        thread.start()
        started.wait()
        _wait_in_flight(run, 5)
        with me.failing("refused", how="blocking"):
            run.all_reduce(np.ones(10), tag=5)
        with me.failing("refused", how="handled"):
            run.all_reduce_async(np.ones(10), tag=5)
        thread.join()
        me.report("reduced", contributors=len(infos[0].contributors))


def _wait_in_flight(run: Any, tag: int) -> None:  # noqa: ANN401 - a communicator
    """Until a thread that was just started is inside its op."""
    while tag not in run._session.engine.tags_in_flight():
        pass


def test_run_wide_calls_and_ops_exclude_each_other(cluster: ProgramCluster) -> None:
    """An op of any thread, driven or handled, forbids them; so does another thread's run-wide call."""
    cluster.start_master()
    peers = cluster.start_program(call_run_wide_too_early, WORLD)
    for peer in peers:
        peer.expect("joined")
    [caller] = [peer for peer in peers if peer.reports("joined")[0]["rank"] == 0]
    for how in ("blocking", "handled"):
        for call in ("update_topology", "meet"):
            refused = caller.expect("refused", how=how, call=call)
            assert refused["error"] == "UsageError"
            assert "in flight (tag 3)" in refused["message"]
        for peer in peers:
            peer.send()
            if peer is not caller:
                peer.expect("reduced")
    assert "another thread" in caller.expect("refused", how="vote")["message"]
    for peer in peers:
        if peer is not caller:
            peer.send()
    for peer in peers:
        peer.wait_success()


def test_a_thread_asks_who_is_pending_while_others_reduce(cluster: ProgramCluster) -> None:
    """The answers are the same on every peer at the same place, although threads run as they like."""
    cluster.start_master()
    peers = cluster.start_program(ask_beside_ops, WORLD)
    for peer in peers:
        peer.expect("joined")
        peer.send()
    for peer in peers:
        peer.expect("asked")  # each has asked some questions by now
    newcomer = cluster.start_one(wait_to_be_admitted)
    answers = [peer.expect("answers", timeout_s=60) for peer in peers]
    shortest = min(len(each["answers"]) for each in answers)
    assert shortest > 1
    assert {tuple(each["answers"][:shortest]) for each in answers} == {(False,) * (shortest - 1) + (True,)}
    assert {len(each["answers"]) for each in answers} == {shortest}
    assert all(each["in_flight"] for each in answers)
    newcomer.expect("admitted", members=WORLD + 1)
    for peer in [*peers, newcomer]:
        peer.wait_success()


def ask_beside_ops(me: ProgramContext) -> None:
    """One thread reduces without a pause, another polls are_peers_pending until it is True; then both stop."""
    with _gather(me) as run:
        me.report("joined", rank=run.rank)
        me.receive()
        stop = np.zeros(1)
        answers: list[bool] = []
        in_flight = 0

        def reduce() -> None:
            while True:
                flag = stop.copy()
                run.all_reduce(np.ones(200_000), tag=1)
                run.all_reduce(flag, op="max", tag=1)
                if flag[0]:
                    return

        thread = threading.Thread(target=reduce)
        thread.start()
        while not answers or not answers[-1]:
            in_flight += bool(run._session.engine.tags_in_flight())
            answers.append(run.are_peers_pending())
            if len(answers) == 3:
                me.report("asked")
        stop[0] = 1
        thread.join()
        me.report("answers", answers=answers, in_flight=in_flight)
        run.update_topology()
        assert run.group_size == WORLD + 1
        run.barrier()


def wait_to_be_admitted(me: ProgramContext) -> None:
    with me.join() as run:
        me.report("admitted", members=run.group_size)
        run.barrier()


def call_run_wide_too_early(me: ProgramContext) -> None:
    from ringfold import UsageError

    with _gather(me) as run:
        me.report("joined", rank=run.rank)
        if run.rank:
            for _ in range(2):
                me.receive()
                run.all_reduce(np.ones(50_000), tag=3)
                me.report("reduced")
            me.receive()
            run.update_topology()
            return

        def refusals(how: str) -> None:
            for call in (run.update_topology, run.meet):
                with me.failing("refused", how=how, call=call.__name__):
                    call()

        thread = threading.Thread(target=lambda: run.all_reduce(np.ones(50_000), tag=3))
        thread.start()
        _wait_in_flight(run, 3)
        refusals("blocking")
        thread.join()
        me.receive()
        handle = run.all_reduce_async(np.ones(50_000), tag=3)
        refusals("handled")
        handle.wait(30)
        me.receive()
        outcomes = []

        def vote() -> None:
            try:
                run.update_topology()
                outcomes.append("done")
            except UsageError as error:
                outcomes.append("refused")
                me.report("refused", how="vote", message=str(error))

        _in_threads([vote, vote])
        assert sorted(outcomes) == ["done", "refused"]


def test_all_threads_that_wait_for_a_handle_get_the_same_result(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = by_id(cluster.start_program(wait_in_many_threads, WORLD))
    peers[1].expect("waiting")
    peers[2].kill()
    answers = peers[1].expect("answers")["answers"]
    assert len(answers) == 8
    assert set(answers) == {"TooFewPeers"}
    peers[1].wait_success()


def wait_in_many_threads(me: ProgramContext) -> None:
    with _gather(me) as run:
        me.report("joined", peer=run.peer_id)
        if run.peer_id == 2:
            me.receive()
        handle = run.all_reduce_async(np.ones(50_000))
        answers = []

        def wait() -> None:
            try:
                handle.wait()
                answers.append("done")
            except Exception as error:
                answers.append(type(error).__name__)

        me.report("waiting")
        _in_threads([wait] * 8)
        me.report("answers", answers=answers)


def test_leaving_ends_the_ops_of_other_threads(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(leave_under_an_op, WORLD)
    for peer in peers:
        if peer.expect("joined")["rank"] == 0:
            assert peer.expect("ended")["error"] == "UsageError"
            assert "left" in peer.reports("ended")[0]["message"]
        else:
            assert peer.expect("alone")["error"] == "TooFewPeers"
        peer.wait_success()


def leave_under_an_op(me: ProgramContext) -> None:
    run = _gather(me)
    me.report("joined", rank=run.rank)
    if run.rank:
        with me.failing("alone"):
            run.all_reduce(np.ones(50_000), tag=8)
        return

    def reduce() -> None:
        with me.failing("ended"):
            run.all_reduce(np.ones(50_000), tag=9)

    thread = threading.Thread(target=reduce)
    thread.start()
    _wait_in_flight(run, 9)
    run.leave()
    thread.join()


def test_after_ctrl_c_the_op_can_be_called_again(cluster: ProgramCluster) -> None:
    """The interrupted peer gives its op up; the others' op is retried, and meets the second call."""
    cluster.start_master()
    peers = cluster.start_program(interrupt_an_op, WORLD)
    for peer in peers:
        peer.expect("joined")
    [interrupted] = [peer for peer in peers if peer.reports("joined")[0]["rank"] == 0]
    assert interrupted.expect("interrupted")["intact"]
    for peer in peers:
        peer.send()
    for peer in peers:
        assert peer.expect("reduced")["contributors"] == WORLD
        peer.wait_success()


def interrupt_an_op(me: ProgramContext) -> None:
    with _gather(me) as run:
        me.report("joined", rank=run.rank)
        array = np.arange(50_000.0)
        if run.rank == 0:

            def interrupt() -> None:
                _wait_in_flight(run, 0)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            try:
                run.all_reduce(array)
            except KeyboardInterrupt:
                me.report("interrupted", intact=bool((array == np.arange(50_000.0)).all()))
        me.receive()
        me.report("reduced", contributors=len(run.all_reduce(array).contributors))


def test_busy_and_evict_are_legal_beside_everything_else(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(work_and_be_busy, WORLD)
    for peer in peers:
        peer.wait_success(60)


def work_and_be_busy(me: ProgramContext) -> None:
    from ringfold import UsageError

    with _gather(me) as run:

        def reduce() -> None:
            for _ in range(30):
                assert len(run.all_reduce(np.ones(1_000)).contributors) == WORLD

        def be_busy() -> None:
            for _ in range(30):
                with run.busy(up_to_s=5), run.busy(up_to_s=1):
                    pass

        def evict_unknown() -> None:
            for _ in range(5):
                try:
                    run.evict("nobody")
                except UsageError as error:
                    me.report("refused", message=str(error))

        _in_threads([reduce, be_busy, be_busy, evict_unknown])
        run.barrier()
