"""A process that loads damaged checkpoints under limits, and says what became of them as JSON.

`python -m tests.crash.fuzz damaged|signed FOLDER COUNT SEED INCREMENTAL`
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
from ostinato.testing.views import bits
from tests.crash.mutations import MANIFEST, Damage, damage, edit
from tests.registry import registered

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = (
    "transform",
    "storage ListStorage",
    "ensemble, ratio",
    "storage LazyTensorStorage, single_copy",
    "SliceSampler, mapped",
    "SliceSamplerWithoutReplacement",
    "PrioritizedSliceSampler",
    "writer TensorDictMaxValueWriter",
    "prefetch",
    "ReservoirWriter, PrioritizedSampler",
    "prefetch, Hindsight",
    "SequenceUnit, ndim=2",
    "max_bytes",
    "HeapSampler, max_times_sampled",
)
"""Buffers of the registry that have every part of a state."""
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
        self._own = [sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1])]
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {arguments!r}"[:200])
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self._root, *self._own, "/proc", "/sys")):
                self.seen.append(f"opened {path}")


class Checkpoint:
    """One saved buffer, its files, and what loading them must give."""

    def __init__(self, root: Path, name: str, incremental: bool) -> None:
        self.root, self.contract = root, registered(name)
        source = self.contract.fill()
        source.dumps(root, incremental=incremental)
        self.contract.extend(source, 2, 30)
        source.dumps(root, incremental=incremental)
        self.files = {entry.name: entry.read_bytes() for entry in root.iterdir() if entry.is_file()}
        self.format = json.loads(self.files[MANIFEST])["format"]
        self.expected = state_of(self.loaded(self.fresh()))
        self.begin_used()

    def fresh(self) -> Any:
        return self.contract.make(self.contract.capacity)

    def begin_used(self) -> None:
        """Make the buffer that must stay as it is where a load is refused."""
        self.used = self.fresh()
        self.contract.extend(self.used, 10, 500)
        self.before = state_of(self.used)

    def loaded(self, rb: Any) -> Any:
        """Load into a buffer and return it."""
        rb.loads(self.root)
        return rb

    def put(self, files: dict[str, bytes | None]) -> None:
        """Write files, or remove them."""
        for name, data in files.items():
            if data is None:
                (self.root / name).unlink()
            else:
                (self.root / name).write_bytes(data)

    def use(self, rb: Any) -> None:
        """Do what users do with a buffer."""
        try:
            self.contract.use(rb)
        finally:
            self.contract.extend(rb, 6, 900)
            self.contract.go_on(rb)
            self.contract.extend(rb, 12, 906)
            self.contract.use(rb)
            state_of(rb)


def state_of(rb: Any) -> Any:
    """Return the state of a buffer and all its rows, so that they compare."""
    members = getattr(rb, "members", [rb])
    return bits([rb.state_dict(), *(member.storage[:] if len(member) else None for member in members)])


class Trials:
    """Counts what became of each, and keeps what should not have happened."""

    def __init__(self, watch: Watch, rng: random.Random) -> None:
        self.watch, self.rng = watch, rng
        self.refused = self.loaded = 0
        self.wrong: list[str] = []

    def run(self, place: Checkpoint, changed: Damage, *, signed: bool) -> None:
        """Refused in words with nothing changed, or nothing is lost, or, if signed anew, a buffer that can be used."""
        rb = place.used if self.rng.random() < 0.5 else place.fresh()
        error = self._try(lambda: place.loaded(rb))
        verified = self._try(lambda: CheckpointReader(place.root, format_name=place.format).verify())
        if error is None:
            self.loaded += 1
            if signed:
                problem = self._try(lambda: place.use(rb))
                self._require(problem is None or isinstance(problem, OstinatoError), f"loads, then {problem!r}")
            else:
                self._require(state_of(rb) == place.expected, "loads other content")
                self._require(verified is None, f"loads, but is not verified: {verified!r}")
            if rb is place.used:
                place.begin_used()
            return
        self.refused += 1
        self._require(isinstance(error, CheckpointError), repr(error))
        if not signed:
            self._check_message(str(error), place, changed)
        if rb is not place.used:
            self._require(not sum(map(len, getattr(rb, "members", [rb]))), "rows are left in a fresh buffer")
        elif state_of(rb) != place.before:
            self._require(False, "refused, but the buffer has changed")
            place.begin_used()

    def _check_message(self, text: str, place: Checkpoint, changed: Damage) -> None:
        named = any(name in text for name in changed.files)
        # a whole manifest of another checkpoint is sound: it names files that are not here
        self._require(named or (MANIFEST in changed.files and str(place.root) in text), f"names {text}")
        for name, data in changed.files.items():
            if name in text and name != MANIFEST and data is not None and len(data) == len(place.files[name]):
                self._require("at byte" in text, f"no offset in {text}")

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


def limit() -> None:
    """Take away the means of doing harm: memory beyond what is held now, and big files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, 2**24))


def main(manner: str, folder: str, count: int, seed: int, incremental: bool) -> dict[str, Any]:
    """Run `count` trials and return what was found."""
    torch.set_num_threads(1)
    root = Path(folder).resolve()
    tempfile.tempdir = str(root)  # mapped storages lie there
    watch, rng = Watch(root), random.Random(seed)
    places = [Checkpoint(root / str(i), name, incremental) for i, name in enumerate(NAMES)]
    trials = Trials(watch, rng)
    for place in places:
        place.use(place.loaded(place.fresh()))  # what is imported on first use is imported now
    limit()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    last = os.open(root / "last", os.O_CREAT | os.O_WRONLY)
    for turn in range(count):
        place = places[turn % len(places)]
        others = [each.files for each in places]
        changed = damage(place.files, others, rng) if manner == "damaged" else edit(place.files, place.format, rng)
        title = f"{turn} {place.contract.name}: {changed.what}"
        os.pwrite(last, title[:500].ljust(500).encode(), 0)
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        before = len(trials.wrong)
        place.put(changed.files)
        trials.run(place, changed, signed=manner == "signed")
        place.put({name: place.files[name] for name in changed.files})
        trials.wrong[before:] = [f"{title}: {text}" for text in trials.wrong[before:]]
    faulthandler.cancel_dump_traceback_later()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    if grown > PEAK_BYTES:
        trials.wrong.append(f"memory grew by {grown} bytes")
    return {"refused": trials.refused, "loaded": trials.loaded, "wrong": trials.wrong}


if __name__ == "__main__":
    faulthandler.enable()
    _, manner, folder, count, seed, incremental = sys.argv
    sys.stdout.write(json.dumps(main(manner, folder, int(count), int(seed), incremental == "True")))
    sys.stdout.flush()
    os._exit(0)  # prefetch threads need no goodbye here
