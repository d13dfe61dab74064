"""`attn-dispatch export` and `import`: decisions are copied unchanged, and files of others are checked."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attn_dispatch import cli
from attn_dispatch.settings import cache_folder
from attn_dispatch.store.address import Address
from attn_dispatch.store.bundle import read_bundle, write_bundle
from attn_dispatch.store.decision import Decision, canonical, decode, encode, from_elsewhere
from attn_dispatch.store.folder import Store
from attn_dispatch.store.passed import note_passed
from attn_dispatch.store.quarantine import Entry, Quarantine
from tests.support import made_up as planted
from tests.support.entries import GROUP, KEY, OTHER, decision, encoded, files_in, written
from tests.support.fakes import SILICON

GIVEN = (
    decision(),
    decision(key=OTHER, group="f" * 12),
    decision(silicon="cpu-other", created="2025-02-01T00:00:00.000000+00:00"),
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[int, str]]:
    caplog.set_level(logging.WARNING, "attn_dispatch")

    def run(*arguments: object) -> tuple[int, str]:
        code = cli.main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return run


Run = Callable[..., tuple[int, str]]


def store_all(*decisions: Decision) -> None:
    for each in decisions:
        assert Store(cache_folder()).put(each) is not None


def stored_files() -> dict[str, bytes]:
    folder = cache_folder()
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_in(folder)}


def imported_files() -> dict[str, bytes]:
    """The stored files as an import elsewhere writes them."""
    return {name: encode(from_elsewhere(decode(content), "imported")) for name, content in stored_files().items()}


def use_cache_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_CACHE_DIR", str(folder))


# --- export and import ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["{folder}/bundle.json", "memory://attn/{folder}.json", "file://{folder}/b.json"])
def test_an_import_of_an_export_is_the_original_marked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store_all(*GIVEN)
    name = place.format(folder=tmp_path)
    code, out = run("export", name)
    assert code == 0
    assert f"3 decisions from {cache_folder()} written to {name}" in out
    before = imported_files()
    use_cache_folder(monkeypatch, tmp_path / "elsewhere")
    code, out = run("import", name, "--json")
    plain = json.loads(out)
    assert code == 0
    assert [plain[how] for how in ("added", "merged", "unchanged", "refused")] == [3, 0, 0, 0]
    assert stored_files() == before
    assert json.loads(run("import", name, "--json")[1])["unchanged"] == 3


def test_the_same_decisions_make_the_same_bytes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = tmp_path / "one.json", tmp_path / "other.json"
    for path, order in zip(paths, (1, -1)):
        use_cache_folder(monkeypatch, tmp_path / path.stem)
        store_all(*GIVEN[::order])
        run("export", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    addresses = [(each["silicon"], each["key"]) for each in json.loads(paths[0].read_bytes())["decisions"]]
    assert addresses == sorted(addresses)


@pytest.mark.parametrize(
    ("options", "count"),
    [((), 3), (("--silicon", SILICON), 2), (("--key", "FF"), 1), (("--silicon", "cpu-o", "--key", KEY[:3]), 1)],
)
def test_options_select_the_exported_decisions(run: Run, tmp_path: Path, options: tuple[str, ...], count: int) -> None:
    store_all(*GIVEN)
    code, out = run("export", tmp_path / "bundle.json", *options, "--json")
    assert code == 0
    assert json.loads(out)["decisions"] == count
    assert len(read_bundle((tmp_path / "bundle.json").read_bytes())) == count


# --- what cannot be read --------------------------------------------------------------------------------------------

BUNDLE = write_bundle(GIVEN)


def bundle(*decisions: bytes) -> bytes:
    return b'{"schema":2,"decisions":[' + b",".join(decisions) + b"]}"


WHOLLY: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "cut": (BUNDLE[:-20], ""),
    "list": (b"[]", "Expected `object`"),
    "later": (BUNDLE.replace(b'{"schema":2', b'{"schema":3', 1), "schema 3, this version reads 2"),
    "nested": (bundle(b"[" * 1_000_000), "Stack overflow" if sys.version_info >= (3, 14) else "recursion"),
    "missing field": (b'{"decisions":[]}', "schema"),
}
PARTLY: dict[str, tuple[bytes, str]] = {
    "no-checksum": (canonical(written()), "checksum"),
    "other-checksum": (encode(decision()).replace(b"0.30000000000000004", b"0.4"), "checksum"),
    "path": (encoded(key="../../../../etc/cron.d"), "address"),
    "negative": (
        encoded(candidates=[{"backend": "sdpa", "order": "natural", "status": "chosen", "median_ms": -1}]),
        "Expected `float` >= 0",
    ),
    "later": (encoded(schema=3), "schema 3"),
    "text": (b'"decision"', "not a decision"),
    "large": (encoded(title="x" * (1 << 24)), "over"),
}


@pytest.mark.parametrize(("content", "reason"), WHOLLY.values(), ids=WHOLLY)
def test_a_damaged_file_is_refused(run: Run, tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "good.json").write_bytes(encode(decision()))
    (tmp_path / "bad.json").write_bytes(content)
    code, out = run("import", tmp_path / "bad.json", tmp_path / "good.json", "--json")
    plain = json.loads(out)
    assert code == 1
    assert (plain["added"], plain["refused"]) == (1, 1)
    (refusal,) = plain["sources"][0]["reasons"]
    assert refusal["what"] == str(tmp_path / "bad.json")
    assert reason in refusal["reason"]


@pytest.mark.parametrize(("content", "reason"), PARTLY.values(), ids=PARTLY)
def test_a_damaged_decision_is_refused(run: Run, tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "bundle.json").write_bytes(bundle(encode(decision()), content))
    code, out = run("import", tmp_path / "bundle.json", "--json")
    plain = json.loads(out)
    assert code == 1
    assert (plain["added"], plain["refused"]) == (1, 1)
    assert reason in plain["sources"][0]["reasons"][0]["reason"]
    assert list(stored_files()) == [f"v2/{SILICON}/{GROUP}/{KEY}.json"]
    assert set(files_in(tmp_path)) == {tmp_path / "bundle.json", *files_in(cache_folder())}


@pytest.mark.parametrize("title", ["C:\\u001b \\\\b\tline\nline Ω", "\x1b]0;owned\x07", "\x9b2J"])
def test_any_title_is_exported_imported_and_shown_printable(
    run: Run, tmp_path: Path, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = decision().candidates
    given = decision(title=title, provenance={"name": title}, candidates=(first, replace(second, reason=title)))
    store_all(given)
    assert run("export", tmp_path / "bundle.json")[0] == 0
    use_cache_folder(monkeypatch, tmp_path / "there")
    assert run("import", tmp_path / "bundle.json")[0] == 0
    assert [each for _, each in Store(cache_folder()).all()] == [from_elsewhere(given, "imported")]
    for options in ((), ("--key", KEY)):
        code, out = run("inspect", *options)
        assert code == 0
        assert out.replace("\n", "").isprintable()
        assert "Ω" in out or "Ω" not in title


def test_a_whole_cache_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files of it are no decisions; beside it a single file of a decision."""
    store_all(*GIVEN)
    (cache_folder() / "missed.jsonl").write_text("{}\n")
    (cache_folder() / "v2" / ".half.json").write_text("{")
    (tmp_path / "single.json").write_bytes(encode(GIVEN[0]))
    entry = Entry(
        backend="made_up", version="1", silicon=SILICON, kind="incorrect", reason="dq is wrong", title="dense"
    )
    Quarantine(cache_folder(), SILICON).add(entry)
    (cache_folder() / "native").mkdir()
    (cache_folder() / "native" / "built.json").write_text("{}")
    source = cache_folder()
    note_passed(source, SILICON, "0" * 20)
    use_cache_folder(monkeypatch, tmp_path / "there")
    code, out = run("import", tmp_path / "single.json", source, "--json")
    assert (code, json.loads(out)["added"], json.loads(out)["unchanged"]) == (0, len(GIVEN), 1)
    assert run("import", source / "quarantine")[0] == 1  # a folder that is named is not skipped


def test_an_import_names_decisions_of_another_problem_s_key(run: Run, tmp_path: Path) -> None:
    problem = planted.problem_at(64)
    right = decision(problem=problem, **Address.of(problem, SILICON)._asdict())
    wrong = [replace(right, key=KEY), replace(right, group=GROUP), replace(right, silicon="cpu-other")]
    (tmp_path / "bundle.json").write_bytes(bundle(*map(encode, (right, *wrong))))
    code, out = run("import", tmp_path / "bundle.json")
    assert (code, len(stored_files())) == (1, 1)
    for each in wrong:
        assert f"refused   {each.silicon}, key {each.key}: its key is not that of its problem" in out


@pytest.mark.parametrize("name", ["nothing://there", "http://127.0.0.1:9/bundle.json", "memory://absent.json", "://"])
def test_an_unreachable_url_is_refused(run: Run, name: str) -> None:
    code, out = run("import", name, "--json")
    assert code == 1
    assert json.loads(out)["sources"][0]["reasons"][0]["reason"]


@pytest.mark.parametrize("place", ["absent/bundle.json", "", "nothing://there"])
def test_a_place_that_cannot_be_written(run: Run, tmp_path: Path, place: str, capsys: Any) -> None:
    store_all(*GIVEN)
    assert cli.main(["export", place if "://" in place else f"{tmp_path}/{place}"]) == 1
    assert "cannot be written: " in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == {cache_folder()}


def test_a_link_that_the_user_names_is_followed(run: Run, tmp_path: Path) -> None:
    store_all(*GIVEN)
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert run("export", tmp_path / "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert len(read_bundle((tmp_path / "real.json").read_bytes())) == 3
    assert run("import", tmp_path / "link.json")[0] == 0


def test_the_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe: its name under /dev leads to a link that names no file. A file is appended to, not replaced."""
    store_all(*GIVEN)
    environment = {**os.environ, "ATTN_DISPATCH_CACHE_DIR": str(cache_folder())}
    command = [sys.executable, "-m", "attn_dispatch", "export", "/dev/stdout"]
    done = subprocess.run([*command, "--json"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == BUNDLE
    assert json.loads(done.stderr)["decisions"] == 3
    with (tmp_path / "all").open("ab") as file:
        file.write(b"before\n")
        file.flush()
        subprocess.run(command, stdout=file, env=environment, check=True)
        file.write(b"after\n")
    assert (tmp_path / "all").read_bytes() == b"before\n" + BUNDLE + b"after\n"
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", "-"])
    assert stop.value.code == 2
    assert "use /dev/stdout" in capsys.readouterr().err


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Listing it and what is in it fails, as a folder without permission does for all but root."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".") -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(folder):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        return read

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


@pytest.mark.parametrize("inner", [".", "v2", f"v2/{SILICON}"])
def test_no_command_takes_an_unreadable_store_for_an_empty_one(
    inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was exported before is not replaced."""
    store_all(GIVEN[0])
    (tmp_path / "bundle.json").write_bytes(BUNDLE)
    unreadable(monkeypatch, cache_folder() / inner)
    why = f"{cache_folder() / inner} cannot be read (Permission denied)"
    assert cli.main(["export", str(tmp_path / "bundle.json")]) == 1
    assert why in capsys.readouterr().err
    assert (tmp_path / "bundle.json").read_bytes() == BUNDLE
    for options in ((), ("--json",), ("--key", "0"), ("--regret",), ("--thresholds",)):
        assert cli.main(["inspect", *options]) == 1
        assert f"attn-dispatch inspect: {why}" in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    assert f"0 in {cache_folder()}; {why}" in capsys.readouterr().out
