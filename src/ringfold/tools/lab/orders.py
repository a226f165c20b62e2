"""Orders to the kernel, collected and then carried out together: one process per tool and namespace, all at once.

A rate that changes for eight hosts is nine namespaces to speak to. One after the other that takes a tenth of a second
on a busy machine, in which some hosts have the new rate and some the old one.
"""

import subprocess
from collections.abc import Iterable

from ringfold.tools.namespaces import ShapingFailed


class Orders:
    """Lines for `ip`, `tc` and `bridge`, by namespace. Those of one tool in one namespace keep their order."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[str]] = {}

    def add(self, tool: str, space: str, *lines: str) -> None:
        """More lines, for later."""
        self._lines.setdefault((tool, space), []).extend(lines)

    def extend(self, tool: str, space: str, lines: Iterable[str]) -> None:
        self.add(tool, space, *lines)

    def carry_out(self) -> None:
        """All that was collected. When one fails, the others are carried out all the same; then it is raised."""
        batches = [(words, "\n".join(lines) + "\n") for words, lines in self._lines.items() if lines]
        self._lines.clear()
        begun = [
            subprocess.Popen(
                [tool, "-n", space, "-batch", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for (tool, space), _ in batches
        ]
        failures = []
        for child, ((tool, space), text) in zip(begun, batches, strict=True):
            _, errors = child.communicate(text)
            if child.returncode != 0:
                failures.append(f"{tool} -n {space}: {errors.strip()}\nin: {text}")
        if failures:
            raise ShapingFailed("".join(failures))
