"""`benchmarks/cpu_threads.py`: what it starts, what it reads, and that it leaves nothing behind."""

from pathlib import Path

import pytest

from tests.children import load_script, wait_until_gone

cpu_threads = load_script("benchmarks/cpu_threads.py")


def test_processes_get_the_column_s_variables_alone_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cpu_threads.VARIABLES:
        monkeypatch.setenv(name, "7")
    log = tmp_path / "log"
    show = f"import os; print({{n: os.environ[n] for n in {cpu_threads.VARIABLES} if n in os.environ}}, flush=True)"
    columns = cpu_threads.settings(2)
    assert list(columns) == ["default", "passive", "one_thread", "chosen"]
    for variables in (columns["passive"], columns["chosen"]):
        with cpu_threads.running(["-c", f"{show}\nwhile True: pass"], variables, log) as process:
            said = cpu_threads.wait_for(lambda: log.read_text().strip(), process, log, 60)
        assert said == str(variables)
        wait_until_gone([str(process.pid)])


def test_a_process_that_ends_early_is_an_error_with_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        cpu_threads.running(["-c", "print('no data')"], {}, log) as process,
        pytest.raises(RuntimeError, match="no data"),
    ):
        cpu_threads.wait_for(lambda: None, process, log, 60)
