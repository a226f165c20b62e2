"""Plain traffic for experiments: a receiver reports the rate that a sender reports."""

import re
import subprocess
import sys

import pytest

from ringfold.tools.cluster import free_port
from ringfold.tools.lab.traffic import main

RECEIVER = [sys.executable, "-m", "ringfold.tools.lab.traffic", "receive"]


@pytest.mark.parametrize(("kind", "rate"), [("tcp", []), ("tcp", ["--mbit", "40"]), ("udp", ["--mbit", "40"])])
def test_a_receiver_counts_what_is_sent(kind: str, rate: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    place = f"127.0.0.1:{free_port()}"
    with subprocess.Popen([*RECEIVER, place], stdout=subprocess.PIPE, text=True) as receiver:
        try:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            main([kind, place, "--seconds", "0.5", *rate])
            assert float(receiver.stdout.readline().removesuffix(" Mbit/s\n")) > 1
        finally:
            receiver.kill()
    sent = re.fullmatch(r"sent ([\d.]+) MB in [\d.]+ s: ([\d.]+) Mbit/s\n", capsys.readouterr().out)
    assert sent is not None
    assert float(sent[1]) > 1
    if rate:
        assert float(sent[2]) < 60


@pytest.mark.parametrize("wrong", [["udp", "127.0.0.1:9"], ["tcp", "127.0.0.1:9", "127.0.0.1:10"]])
def test_a_sender_has_one_address_and_datagrams_a_rate(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)
