"""Upgrades lose nothing, and what cannot be upgraded says why in one sentence."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import make_url

from db import queue, upgrade
from db.database import Database, connect
from db.engine import open_database
from db.models import Base
from db.problems import DatabaseProblem
from db.repository import create_run, run_events

SPEC = {"schema": 1, "kind": "train_step", "world": "cpu"}

# A later revision that rebuilds a parent table, as SQLite must for most changes of a table.
REBUILD = """
import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "0008"


def upgrade():
    with op.batch_alter_table("run", recreate="always") as batch:
        batch.add_column(sa.Column("note", sa.Text()))
    {extra}
"""


def test_the_newest_revision_is_where_alembic_s_scripts_end(tmp_path: Path) -> None:
    for scripts in (upgrade.MIGRATIONS, later_scripts(tmp_path)):
        directory = ScriptDirectory.from_config(upgrade.migration_config(scripts=scripts))
        assert upgrade.newest_revision(scripts) == directory.get_current_head()


def test_a_database_of_today_is_opened_without_alembic(tmp_path: Path) -> None:
    file = tmp_path / "peakmark.db"
    open_database(f"sqlite:///{file}", recorded=None).close()
    code = (
        "import sys; from db.engine import open_database; "
        f"open_database('sqlite:///{file}', recorded=None).close(); print('alembic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def count(file: Path, table: str) -> int:
    with sqlite3.connect(file) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def later_scripts(folder: Path, extra: str = "") -> Path:
    scripts = folder / "migrations"
    shutil.copytree(upgrade.MIGRATIONS, scripts)
    (scripts / "versions" / "r9999_rebuild.py").write_text(
        REBUILD.format(revision="9999", extra=extra)
    )
    return scripts


def populate(database: Database) -> str:
    run_id = create_run(database, SPEC, idempotency_key="a")
    worker = queue.WorkerIdentity(host="h", pid=1, pid_start_ticks=1)
    held = queue.claim_next_run(database, worker)
    assert held is not None
    queue.reserve_gpus(database, held.lease, ("GPU-1",))
    return run_id


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """Root writes to read-only files: be an ordinary user for a while."""
    if os.geteuid() != 0:
        yield
        return
    closed = [folder for folder in tmp_path.parents if not folder.stat().st_mode & 0o001]
    modes = {folder: folder.stat().st_mode for folder in closed}
    for folder, mode in modes.items():
        folder.chmod(mode | 0o011)
    tmp_path.chmod(0o777 if (tmp_path / "peakmark.db").exists() else 0o755)
    os.seteuid(65534)
    yield
    os.seteuid(0)
    for folder, mode in modes.items():
        folder.chmod(mode)


def test_models_and_migrations_agree(database: Database) -> None:
    with database.engine.connect() as connection:
        command.check(upgrade.migration_config(connection))


def test_the_migrated_tables_are_those_of_the_models(database: Database, file: Path) -> None:
    with sqlite3.connect(file) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    assert set(Base.metadata.tables) < names


def test_every_connection_has_our_settings(database: Database) -> None:
    with database.read() as session:
        ask = session.connection().exec_driver_sql
        assert ask("PRAGMA journal_mode").scalar() == "wal"
        assert ask("PRAGMA synchronous").scalar() == 1
        assert ask("PRAGMA foreign_keys").scalar() == 1
        assert ask("PRAGMA busy_timeout").scalar() == 10_000


@pytest.mark.parametrize(
    ("table", "column", "value"), [("run", "state", "flying"), ("run", "world", "moon")]
)
def test_a_word_outside_a_choice_is_refused_by_the_database_itself(
    database: Database, file: Path, table: str, column: str, value: str
) -> None:
    create_run(database, SPEC, idempotency_key="a")
    with sqlite3.connect(file) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))


def test_the_first_revision_s_measurements_may_be_held_out_after_an_upgrade(
    tmp_path: Path, file: Path
) -> None:
    first = tmp_path / "migrations"
    shutil.copytree(upgrade.MIGRATIONS, first)
    for script in (first / "versions").glob("r*.py"):
        if not script.name.startswith("r0001"):
            script.unlink()
    url = make_url(f"sqlite:///{file}")
    upgrade.upgrade(url, scripts=first)
    with sqlite3.connect(file) as connection:
        connection.execute("INSERT INTO environment VALUES (1, 'h', '{}', NULL, 0)")
        row = (
            "1, 'a', NULL, 1, 'recorded', '{}', 'train_step', 'solo', 'done', '{}', '{}', NULL, "
            "'2026', NULL, NULL, NULL, NULL, NULL"
        )
        insert = "INSERT INTO measurement VALUES ({})"
        connection.execute(insert.format(row.replace("{}", "evidence", 1)))
    upgrade.upgrade(url)
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT role FROM measurement").fetchall() == [("evidence",)]
        connection.execute("UPDATE measurement SET role = 'holdout', kind = 'calibrate'")
        for column, word in (
            ("role", "guess"),
            ("kind", "dream"),
            ("world", "moon"),
            ("outcome", "flying"),
        ):
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(f"UPDATE measurement SET {column} = ?", (word,))


def test_a_second_opening_migrates_nothing_and_makes_no_backup(
    database: Database, file: Path
) -> None:
    populate(database)
    open_database(str(file), recorded=None)
    assert count(file, "run") == 1
    assert list(file.parent.glob("*.backup")) == []


def test_rebuilding_a_parent_table_keeps_its_children(
    database: Database, file: Path, tmp_path: Path
) -> None:
    run_id = populate(database)
    database.close()
    upgrade.upgrade(database.url, scripts=later_scripts(tmp_path))
    assert count(file, "run_event") == 2
    assert count(file, "gpu_reservation") == 1
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT id, note FROM run").fetchall() == [(run_id, None)]
        assert connection.execute("SELECT * FROM alembic_version").fetchall() == [("9999",)]


def test_the_database_is_backed_up_before_it_is_changed(
    database: Database, file: Path, tmp_path: Path
) -> None:
    run_id = populate(database)
    # Not closed: the backup must hold what still lies in the write-ahead log.
    upgrade.upgrade(database.url, scripts=later_scripts(tmp_path))
    [backup] = file.parent.glob("*.backup")
    copy = open_database(str(backup), recorded=None)
    assert [event.to_state for event in run_events(copy, run_id)] == ["queued", "running"]


@pytest.mark.parametrize(
    "loss",
    ['op.execute("DELETE FROM run_event")', 'op.execute("DELETE FROM run")'],
)
def test_an_upgrade_that_would_lose_rows_is_undone(
    database: Database, file: Path, tmp_path: Path, loss: str
) -> None:
    populate(database)
    database.close()
    with pytest.raises(DatabaseProblem, match="was left as it was"):
        upgrade.upgrade(database.url, scripts=later_scripts(tmp_path, loss))
    assert count(file, "run_event") == 2
    open_database(str(file), recorded=None)


def test_two_processes_may_open_a_new_database_at_once(file: Path) -> None:
    script = "import sys; from db.engine import open_database; open_database(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", script, str(file)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]


def test_a_newer_database_is_left_alone(database: Database, file: Path, tmp_path: Path) -> None:
    populate(database)
    database.close()
    upgrade.upgrade(database.url, scripts=later_scripts(tmp_path))
    with pytest.raises(DatabaseProblem, match=r"newer version of Peakmark \(revision 9999\)"):
        open_database(str(file))
    assert count(file, "run") == 1


def test_a_database_of_another_program_is_left_alone(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE recipe (id INTEGER)")
    with pytest.raises(DatabaseProblem, match="holds tables of another program"):
        open_database(str(file))
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipe",)]


def test_a_file_that_is_no_database_is_named(file: Path) -> None:
    file.write_text("this is a letter, not a database " * 100)
    with pytest.raises(DatabaseProblem) as caught:
        open_database(str(file))
    assert str(caught.value) == (
        f"The database {file} is not an SQLite database: choose another file."
    )


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseProblem, match="is a folder: name a file"):
        open_database(str(tmp_path))


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    open_database(str(tmp_path / "a" / "b" / "peakmark.db"), recorded=None)
    assert (tmp_path / "a" / "b" / "peakmark.db").exists()


def test_a_file_in_the_way_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(DatabaseProblem, match=r"/a for the database cannot be made: File exists"):
        open_database(str(tmp_path / "a" / "peakmark.db"))


def test_a_read_only_file_is_named(database: Database, file: Path, as_nobody: None) -> None:
    if os.getuid() != 0:
        file.chmod(0o444)
    with pytest.raises(DatabaseProblem) as caught:
        open_database(str(file))
    assert str(caught.value) == f"The database {file} is read-only: make the file writable."


def test_a_read_only_folder_is_named(tmp_path: Path, as_nobody: None) -> None:
    if os.getuid() != 0:
        tmp_path.chmod(0o555)
    with pytest.raises(DatabaseProblem, match=f"The folder {tmp_path} of the database is read-on"):
        open_database(str(tmp_path / "peakmark.db"))


def test_writing_to_a_read_only_connection_says_so(file: Path, database: Database) -> None:
    database.close()
    url = make_url(f"sqlite:///file:{file}?mode=ro&uri=true")
    readonly = Database(engine=connect(url), url=url)
    with pytest.raises(DatabaseProblem, match="is read-only: make the file"):
        create_run(readonly, SPEC, idempotency_key="a")


def test_a_full_disk_says_so_and_may_pass(database: Database) -> None:
    with pytest.raises(DatabaseProblem, match="the disk is full") as caught:
        with database.write() as session:
            session.connection().exec_driver_sql("PRAGMA max_page_count = 1")
        for key in range(500):
            create_run(database, {**SPEC, "x": "y" * 9000}, idempotency_key=str(key))
    assert caught.value.passing


def test_a_url_that_is_none_is_explained() -> None:
    with pytest.raises(DatabaseProblem, match="must look like sqlite:///"):
        open_database("://")


def test_the_environment_names_the_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", f"sqlite:///{tmp_path}/mine.db")
    database = open_database(recorded=None)
    assert database.name == f"{tmp_path}/mine.db"
    assert database.data_directory == tmp_path
    monkeypatch.delenv("PEAKMARK_DATABASE_URL")
    monkeypatch.chdir(tmp_path)
    assert open_database(recorded=None).name == f"{tmp_path}/var/peakmark.db"
