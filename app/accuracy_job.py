"""Accuracy, recomputed beside the pages: hundreds of predictions take most of a minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock, Thread
from typing import Any

from planner.accuracy import AccuracyReport, accuracy_report, merged_reports
from planner.records import RecordError, parse_row


class AccuracyJob:
    """Predicts for stored rows in a thread of its own, for each row once while the server runs."""

    def __init__(self) -> None:
        self._report_of: dict[str, AccuracyReport] = {}
        self._lock = Lock()
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    def report(
        self, rows: Sequence[Mapping[str, Any]], wait_s: float | None
    ) -> AccuracyReport | None:
        """Return the report over `rows`; None if it takes longer than `wait_s` (None: for ever).

        The thread goes on meanwhile; a fault of a prediction is raised here, once.
        """
        thread = self._started(rows)
        if thread is not None:
            thread.join(wait_s)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self.done(rows) < len(rows):
            # Rows that came while another call's were predicted are next.
            return self.report(rows, wait_s) if wait_s is None else None
        return merged_reports(self._report_of[row["id"]] for row in rows)

    def done(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Return how many of the rows have been predicted for."""
        return sum(row["id"] in self._report_of for row in rows)

    def _started(self, rows: Sequence[Mapping[str, Any]]) -> Thread | None:
        """Return the thread at work, started if rows are missing and none is."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return self._thread
            missing = [row for row in rows if row["id"] not in self._report_of]
            if not missing:
                return None
            self._thread = Thread(target=self._predict, args=(missing,), daemon=True)
            self._thread.start()
            return self._thread

    def _predict(self, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            for row in rows:
                self._report_of[row["id"]] = _report_of(row)
        except Exception as error:
            # Told by the page that asks next; a thread's own traceback would reach nobody.
            self._failure = error


def _report_of(row: Mapping[str, Any]) -> AccuracyReport:
    """Return the report over one row; over none where this version cannot read it."""
    try:
        return accuracy_report([parse_row(row)])
    except RecordError:
        return accuracy_report([])
