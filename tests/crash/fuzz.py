"""A process that loads damaged checkpoints under limits, and says what became of them as JSON.

`python -m tests.crash.fuzz damaged|signed FOLDER COUNT SEED SAVE LOAD`
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ostinato.durable import CheckpointReader
from ostinato.errors import CheckpointError, OstinatoError
from tests.crash.kinds import KINDS, extend, fill, fingerprint, go_on, read_all
from tests.crash.modes import LOADS, SAVES
from tests.crash.mutations import MANIFEST, Damage, damage, edit

if TYPE_CHECKING:
    from collections.abc import Callable

EXTRA_BYTES = 512 * 2**20
"""Address space beyond what the warm process has."""
PEAK_BYTES = 96 * 2**20
PATIENCE_S = 30
_FORBIDDEN = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.fork")


class Watch:
    """Notes code that is run and files that are opened outside a folder, while it is switched on."""

    def __init__(self, root: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        self._root = str(root)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {arguments!r}"[:200])
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self._root, sys.prefix, sys.base_prefix, "/proc", "/sys")):
                self.seen.append(f"opened {path}")


class Checkpoint:
    """One saved buffer, its files, and what loading them must give."""

    def __init__(self, root: Path, kind: str, save: str, load: str) -> None:
        self.root, self.make, self.options = root, KINDS[kind], LOADS[load]
        source = fill(self.make())
        source.dumps(root, **SAVES[save])
        extend(source, 30, 2)
        source.dumps(root, **SAVES[save])
        self.files = {entry.name: entry.read_bytes() for entry in root.iterdir() if entry.is_file()}
        self.format = json.loads(self.files[MANIFEST])["format"]
        fresh = self.loaded(self.make())
        self.expected = fingerprint(fresh.state_dict(), read_all(fresh))
        self.used: Any = None
        self.begin_used()

    def begin_used(self) -> None:
        """Make the buffer that must stay as it is where a load is refused."""
        self.used = self.make()
        extend(self.used, 500, 10)
        self.before = fingerprint(self.used.state_dict(), read_all(self.used))

    def loaded(self, rb: Any) -> Any:
        """Load into a buffer and return it."""
        rb.loads(self.root, **self.options)
        return rb

    def put(self, changed: Damage) -> None:
        """Damage the files."""
        for name, data in changed.files.items():
            if data is None:
                (self.root / name).unlink()
            else:
                (self.root / name).write_bytes(data)

    def restore(self, changed: Damage) -> None:
        """Bring the files back."""
        for name in changed.files:
            (self.root / name).write_bytes(self.files[name])


class Trials:
    """Counts what became of each, and keeps what should not have happened."""

    def __init__(self, watch: Watch, rng: random.Random) -> None:
        self.watch, self.rng = watch, rng
        self.refused = self.loaded = 0
        self.wrong: list[str] = []

    def damaged(self, place: Checkpoint, changed: Damage) -> None:
        """Refused by name, or nothing lost."""
        rb = place.used if self.rng.random() < 0.5 else place.make()
        error = self._try(lambda: place.loaded(rb))
        verified = self._try(lambda: CheckpointReader(place.root, format_name=place.format).verify())
        if error is None:
            self.loaded += 1
            found = fingerprint(rb.state_dict(), read_all(rb))
            self._require(found == place.expected, f"{changed.what}: loads other content")
            if rb is place.used:
                place.begin_used()
        else:
            self._refusal(error, place, changed)
            self._unchanged(place, rb, changed)
        if error is None and verified is not None:
            self._require(False, f"{changed.what}: loads, but is not verified: {verified!r}")

    def signed(self, place: Checkpoint, changed: Damage) -> None:
        """Refused in words with nothing changed, or a buffer that can be used."""
        rb = place.used if self.rng.random() < 0.5 else place.make()
        error = self._try(lambda: place.loaded(rb))
        if error is None:
            self.loaded += 1
            problem = self._try(lambda: _use(rb))
            if problem is not None and not isinstance(problem, OstinatoError):
                self.wrong.append(f"{changed.what}: loads, then {problem!r}")
            if rb is place.used:
                place.begin_used()
        else:
            self.refused += 1
            self._require(isinstance(error, CheckpointError), f"{changed.what}: {error!r}")
            self._unchanged(place, rb, changed)

    def _refusal(self, error: Exception, place: Checkpoint, changed: Damage) -> None:
        self.refused += 1
        text = str(error)
        self._require(isinstance(error, CheckpointError), f"{changed.what}: {error!r}")
        named = any(name in text for name in changed.files)
        # a whole manifest of another checkpoint is sound: it names files that are not here
        self._require(named or (MANIFEST in changed.files and str(place.root) in text), f"{changed.what}: names {text}")
        for name, data in changed.files.items():
            if name in text and name != MANIFEST and data is not None and len(data) == len(place.files[name]):
                self._require("at byte" in text, f"{changed.what}: no offset in {text}")

    def _unchanged(self, place: Checkpoint, rb: Any, changed: Damage) -> None:
        if rb is place.used:
            found = fingerprint(rb.state_dict(), read_all(rb))
            self._require(found == place.before, f"{changed.what}: refused, but the buffer has changed")
            if found != place.before:
                place.begin_used()
        else:
            left = sum(map(len, getattr(rb, "members", [rb])))
            self._require(left == 0, f"{changed.what}: refused, but rows are left in a fresh buffer")

    def _require(self, good: bool, what: str) -> None:
        if not good:
            self.wrong.append(what)

    def _try(self, work: Callable[[], Any]) -> Exception | None:
        self.watch.on = True
        try:
            work()
        except Exception as error:
            return error
        finally:
            self.watch.on = False
            if self.watch.seen:
                self.wrong.append(f"it has {self.watch.seen}")
                self.watch.seen.clear()
        return None


def _use(rb: Any) -> None:
    """Do what users do with a buffer."""
    try:
        go_on(rb, 3)
    finally:
        extend(rb, 900, 5)
        go_on(rb, 3)
        extend(rb, 905, 30)
        go_on(rb, 2)
        read_all(rb)
        rb.state_dict()


def limit() -> None:
    """Take away the means of doing harm: memory beyond what is held now, and big files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, 2**24))


def main(manner: str, folder: str, count: int, seed: int, save: str, load: str) -> dict[str, Any]:
    """Run `count` trials and return what was found."""
    torch.set_num_threads(1)
    root = Path(folder).resolve()
    tempfile.tempdir = str(root)  # mapped storages lie there
    watch = Watch(root)
    rng = random.Random(seed)
    places = [Checkpoint(root / str(i), kind, save, load) for i, kind in enumerate(KINDS)]
    trials = Trials(watch, rng)
    for place in places:
        _use(place.loaded(place.make()))  # what is imported on first use is imported now
    limit()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    last = os.open(root / "last", os.O_CREAT | os.O_WRONLY)
    for turn in range(count):
        place = places[turn % len(places)]
        others = [each.files for each in places]
        changed = damage(place.files, others, rng) if manner == "damaged" else edit(place.files, place.format, rng)
        os.pwrite(last, f"{turn} {list(KINDS)[turn % len(places)]}: {changed.what}"[:500].ljust(500).encode(), 0)
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        before = len(trials.wrong)
        place.put(changed)
        getattr(trials, manner)(place, changed)
        place.restore(changed)
        trials.wrong[before:] = [f"{turn} {list(KINDS)[turn % len(places)]}, {text}" for text in trials.wrong[before:]]
    faulthandler.cancel_dump_traceback_later()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    if grown > PEAK_BYTES:
        trials.wrong.append(f"memory grew by {grown} bytes")
    return {"refused": trials.refused, "loaded": trials.loaded, "wrong": trials.wrong, "grown": grown}


if __name__ == "__main__":
    faulthandler.enable()
    _, manner, folder, count, seed, save, load = sys.argv
    sys.stdout.write(json.dumps(main(manner, folder, int(count), int(seed), save, load)))
    sys.stdout.flush()
    os._exit(0)  # prefetch threads need no goodbye here
