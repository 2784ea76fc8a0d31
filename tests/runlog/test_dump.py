"""The contents of a dump: collectives in words, and never a failure."""

import json

from tests.written_runs import Clock
from trifocal.runlog.heartbeat import Heartbeat
from trifocal.runlog.jsonl import JsonLinesWriter
from trifocal.runlog.stalls.collectives import (
    Collective,
    decode,
    describe,
    describe_waiting_ranks,
    recorded_collectives,
)
from trifocal.runlog.stalls.dump import read_answers, stall_summary, write_details, write_stacks
from trifocal.runlog.stalls.watchdog import Watchdog


def entry(number, name="nccl:all_reduce", **fields):
    """A record as NCCL's flight recorder gives it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": name,
        "time_created_ns": (1000 + number) * 10**9,
        "input_sizes": [[16, 4]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "duration_ms": 0.25,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 1},
            {"name": "exchange", "filename": "/home/me/own.py", "line": 7},
        ],
    } | fields


def test_records_are_told_in_words():
    found = decode({"entries": [entry(1), entry(2, state="started", retired=False, duration_ms=None)]}, now=1012.0)
    assert [collective.ended for collective in found] == [True, False]
    page = describe(found)
    assert (
        "not ended:\n\n  nccl all_reduce number 2 of group 0 default_pg: started, called 10.0 s ago; [16, 4] Float; "
        "exchange (own.py:7)\n" in page
    )
    assert "number 1 of group 0 default_pg: completed, called 11.0 s ago, took 0.25 ms" in page


def test_stacks_of_a_file_whose_name_is_no_text_are_written(tmp_path):
    exec(compile("write_stacks(tmp_path, 0)", "/home/caf\udce9/own.py", "exec"), globals(), {"tmp_path": tmp_path})
    assert "/home/caf\\udce9/own.py" in (tmp_path / "stacks_rank0.txt").read_text()


def collective(number, *, ended, library="nccl", group="0 default_pg"):
    state = "completed" if ended else "started"
    return Collective(library, group, number, "all_reduce", "[1] Float", ended, state, 5.0, None, "")


def test_it_says_who_waits_for_whom():
    open_one, before = collective(5, ended=False), collective(4, ended=True)
    assert describe_waiting_ranks({0: [open_one], 1: [before], 2: [open_one]}) == [
        "Ranks 0, 2 wait in nccl's all_reduce number 5 of group 0 default_pg for rank 1, which has not called it."
    ]
    (sentence,) = describe_waiting_ranks({0: [open_one], 1: [open_one]})
    assert sentence.startswith("All ranks are in nccl's all_reduce number 5")
    # Nobody waits; another library's numbers are counted apart.
    assert describe_waiting_ranks({0: [collective(5, ended=True)], 1: [before]}) == []
    apart = [collective(9, ended=True, library="gloo"), before]
    assert "rank 1" in describe_waiting_ranks({0: [apart[0], open_one], 1: apart})[0]
    assert describe_waiting_ranks({}) == []


def test_without_processes_there_is_nothing_on_record(tmp_path):
    assert recorded_collectives() == []
    write_stacks(tmp_path, 3)
    row = Heartbeat(tmp_path / "heartbeat", 3).snapshot()
    write_details(tmp_path, 3, row)
    assert {path.name for path in tmp_path.iterdir()} == {"rank3.json", "stacks_rank3.txt"}
    answer = read_answers(tmp_path)[3]
    assert answer.row == json.loads(json.dumps(row)) and answer.collectives == []
    (tmp_path / "rank4.json").write_text('{"row"')
    assert list(read_answers(tmp_path)) == [3]


def test_a_part_that_fails_says_so_in_its_file(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("no recorder")

    monkeypatch.setattr("trifocal.runlog.stalls.dump.recorded_collectives", broken)
    write_details(tmp_path, 0, Heartbeat(tmp_path / "heartbeat").snapshot())
    assert (tmp_path / "collectives_rank0.txt").read_text() == "cannot be read: no recorder\n"
    assert 0 in read_answers(tmp_path)


def test_the_summary_tells_who_has_answered_and_who_has_not(tmp_path, monkeypatch):
    beats = {}
    for rank in (0, 1, 2):
        with JsonLinesWriter(tmp_path / "heartbeat" / f"rank{rank}.jsonl") as writer:
            beats[rank] = Heartbeat(tmp_path / "heartbeat", rank).snapshot() | {"phase": "backward", "step": 7}
            beats[rank] |= {"status": "finished"} if rank == 2 else {}
            writer.append(beats[rank])
    folder = tmp_path / "dumps" / "stalled"
    folder.mkdir(parents=True)

    def answer(rank, *collectives):
        monkeypatch.setattr("trifocal.runlog.stalls.dump.recorded_collectives", lambda: list(collectives))
        write_details(folder, rank, beats[rank])

    answer(0, collective(5, ended=False))
    text = stall_summary(tmp_path, folder, 0, "is stalled", beats[0])
    assert text.startswith("# Rank 0 is stalled\n\nAt step 7,")
    assert "- Rank 0 was in backward for 0:00" in text
    assert "- Rank 1 has not answered: " in text and "every rank is making progress" not in text
    assert "Rank 2" not in text and "| 2 | finished | 7 |" in text and "last stacks" not in text
    (tmp_path / "dumps" / "stacks_rank1.txt").write_text("Fatal Python error: Aborted\n")
    text = stall_summary(tmp_path, folder, 0, "is stalled", beats[0])
    assert "Its last stacks are in stacks_rank1.txt, one folder up." in text
    answer(1, collective(4, ended=True))
    text = stall_summary(tmp_path, folder, 0, "is stalled", beats[0])
    assert "Nothing is stuck: every rank is making progress." in text
    assert "- Rank 0 waits in nccl's all_reduce number 5 of group 0 default_pg for rank 1, which has not called" in text


def test_where_nothing_can_be_written_the_stall_is_said_all_the_same(tmp_path, caplog):
    """A file stands where the folder of dumps should be."""
    (tmp_path / "dumps").write_text("")
    said = []
    clock = Clock()
    heartbeat = Heartbeat(tmp_path / "heartbeat", clock=clock)
    with Watchdog(heartbeat, tmp_path, on_stall=said.append) as watchdog:
        with heartbeat.phase("data"):
            clock.pass_seconds(1.0)
        with heartbeat.phase("data"):
            clock.pass_seconds(121.0)
            watchdog.observe(heartbeat.snapshot())
    assert "rank 0 is stalled in data" in said[0]
    assert "cannot open" in caplog.text and "cannot write the dump" in caplog.text
