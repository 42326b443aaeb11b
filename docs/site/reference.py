"""The API reference: one page for each group of public names, made when the site is built, and `ostinato --help`."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import commands
from mkdocs.structure.files import File

from ostinato import ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mkdocs.config.defaults import MkDocsConfig


@dataclass(frozen=True)
class Section:
    """A part of the reference: in the navigation a section, on the index page a heading."""

    placeholder: str
    """The entry of `nav` in mkdocs.yml that stands for its pages."""
    title: str
    lead: str
    """Who its names are for, in a sentence."""


CALLED = Section(
    "reference/", "API", "What programs import and call. Names without a module are imported from `ostinato`."
)
IMPLEMENTED = Section(
    "reference/custom/",
    "Custom parts",
    "What a storage, sampler, writer or unit of your own subclasses, exchanges with a buffer, and is tested with.",
)

_EACH_NAME = re.compile(r"<code>([A-Za-z_][\w.]*?)(\([^<]*\))?</code>")

_GUIDE = re.compile(r"\bdocs/([\w/-]+)\.md(#[\w-]+)?")


_EVERYDAY = (
    *("add", "extend", "sample", "update_priority", "dumps", "loads", "stats", "empty", "delete", "query", "check"),
    *("storage", "sampler", "writer", "sample_unit", "transform", "batch_size", "write_count", "cursor"),
)
"""Members of `ReplayBuffer` that its page shows first: there are sixty."""


@dataclass(frozen=True)
class Group:
    """One page of the reference.

    Args:
        title: its title in the navigation.
        lead: what the names are for, in a sentence.
        names: public names by their paths below `ostinato`, in the order of the page.
        modules: modules of which the page shows every public name that no other page shows.
        guide: the page of the guides about them, or nothing.
        section: the part of the reference.
    """

    title: str
    lead: str
    names: str = ""
    modules: str = ""
    guide: str = ""
    section: Section = CALLED

    @property
    def uri(self) -> str:
        """Path of the page in the site."""
        return f"reference/{self.title.lower().replace(' ', '-')}.md"


GROUPS = (
    Group(
        "Buffers",
        "A buffer composes a storage, a sampler and a writer.",
        "ReplayBuffer TensorDictReplayBuffer PrioritizedReplayBuffer TensorDictPrioritizedReplayBuffer HERReplayBuffer "
        "BufferStats ConditionalUpdateResult",
        guide="choosing.md",
    ),
    Group(
        "Storages",
        "A storage holds the rows of a buffer.",
        "TensorStorage LazyTensorStorage LazyMemmapStorage ListStorage LazyStackStorage RaggedTensorStorage "
        "CompressedListStorage StorageEnsemble Codec ZlibCodec ZstdCodec",
        modules="ostinato.storages",
        guide="choosing.md",
    ),
    Group(
        "Samplers",
        "A sampler draws the rows of a batch.",
        "RandomSampler SamplerWithoutReplacement PrioritizedSampler SliceSampler "
        "SliceSamplerWithoutReplacement PrioritizedSliceSampler StreamingSliceSampler PromptGroupSampler "
        "StalenessAwareSampler ConsumingSampler LimitedSampler QueueSampler StackSampler HeapSampler SamplerEnsemble",
        modules="ostinato.samplers",
        guide="sampling.md",
    ),
    Group(
        "Writers",
        "A writer decides which slot a new row takes.",
        "RoundRobinWriter TensorDictRoundRobinWriter TensorDictMaxValueWriter ReservoirWriter "
        "ImmutableDatasetWriter WriterEnsemble",
        modules="ostinato.writers",
        guide="choosing.md",
    ),
    Group(
        "Sample units",
        "A unit turns each drawn row into a transition, a window or a stack.",
        "NStep SequenceUnit FrameStack DeltaTimestamps Hindsight HindsightStrategy Transition",
        modules="ostinato.units",
        guide="sampling.md",
    ),
    Group(
        "Transforms",
        "A transform changes batches, and rows before they are stored.",
        "ComposeTransforms SelectFields ExcludeFields RenameFields CastFields RewardScale ToDevice",
        modules="ostinato.transforms",
    ),
    Group(
        "Episodes and queries",
        "Where episodes end, and whole trajectories that meet a condition.",
        "Episodes DEFAULT_DONE_KEYS find_start_stop_traj traj TrajectoryPredicate iter_trajectories "
        "filter_trajectories",
        guide="sampling.md",
    ),
    Group(
        "Flow control",
        "Rate limits, and schedules of the numbers of samplers.",
        "RateLimiter LinearScheduler StepScheduler LambdaScheduler SchedulerList",
        guide="flow.md",
    ),
    Group(
        "Ensembles",
        "Batches from several buffers.",
        "ReplayBufferEnsemble OfflineToOnlineReplayBuffer prefill_replay_buffer",
        guide="mixing.md",
    ),
    Group(
        "Trajectories",
        "Rollouts on disk, sampled without loading them.",
        "TrajectoryReplayBuffer Trajectory",
        modules="ostinato.trajectories",
        guide="trajectories.md",
    ),
    Group(
        "Datasets",
        "Datasets of robots and of offline reinforcement learning as buffers.",
        "open_dataset DatasetStorage export",
        modules="ostinato.datasets",
        guide="datasets.md",
    ),
    Group(
        "Groups",
        "Groups of responses to one prompt, each trained exactly once.",
        "GroupBuffer TokenBudget GroupServer GroupClient RayGroupBuffer GroupLogger",
        modules="ostinato.groups",
        guide="groups.md",
    ),
    Group(
        "Checkpoints",
        "The layout in which a storage saves its rows, hooks of saving and loading, and how long calls show progress.",
        "TensorStorageCheckpointer FlatStorageCheckpointer NestedStorageCheckpointer H5StorageCheckpointer "
        "ListStorageCheckpointer CompressedListStorageCheckpointer StorageEnsembleCheckpointer "
        "TED2Flat Flat2TED TED2Nested Nested2TED H5Split H5Combine "
        "ProgressOption",
        guide="saving.md",
    ),
    Group(
        "Distributed",
        "Buffers that serve other processes.",
        "RayReplayBuffer ShardedReplayBuffer RemoteTensorDictReplayBuffer",
        guide="scaling.md",
    ),
    Group(
        "Collecting",
        "Steps of Gymnasium vector environments as rows.",
        "VectorEnvRecorder",
        modules="ostinato.collect",
        guide="environments.md",
    ),
    Group(
        "Errors",
        "All errors derive from `OstinatoError`, and each from the closest built-in.",
        modules="ostinato.errors",
    ),
    Group(
        "Compatibility",
        "Classes with the interfaces of other libraries.",
        modules="ostinato.compat.torchrl ostinato.compat.sb3 ostinato.compat.lerobot ostinato.compat.skrl "
        "ostinato.compat.fasttd3 ostinato.compat.isaacgymenvs ostinato.compat.objectrl ostinato.compat.miles",
        guide="migrating.md",
    ),
    Group(
        "Tools",
        "What the command line calls: functions that inspect, verify, convert, merge, split and compact saved data.",
        modules="ostinato.tools",
        guide="saving.md",
    ),
    Group(
        "Visualization",
        "Frames of trajectories and figures of buffers.",
        modules="ostinato.viz",
        guide="viewing.md",
    ),
    Group(
        "Custom storages",
        "Base classes of storages, and of the layouts in which checkpoints hold their rows.",
        "Storage StorageColumn StorageCheckpointerBase",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Custom samplers",
        "Base classes of samplers, and of the schedules of their numbers.",
        "Sampler samplers.CountingSampler samplers.PrioritySampler ParameterScheduler",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Custom writers",
        "The base class of writers.",
        "Writer",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Custom units",
        "The base class of sample units, and how several become one.",
        "SampleUnit units.chain_units",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Observers",
        "What follows the rows of a buffer, such as a number of each row.",
        "Observer RowValues",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Protocols",
        "Types of the values that custom parts and buffers exchange.",
        modules="ostinato.protocols",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Contract tests",
        "Test classes that custom parts must pass.",
        modules="ostinato.testing",
        guide="extending.md",
        section=IMPLEMENTED,
    ),
    Group(
        "Audit",
        "Examines any replay buffer, and the adapters that this needs.",
        modules="ostinato.testing.audit",
        guide="audit.md",
        section=IMPLEMENTED,
    ),
)
"""The pages, in the order of the navigation."""


def with_pages(nav: Any) -> Any:
    """Return `nav` with the pages of each section in the place of its placeholder."""
    if isinstance(nav, list):
        return [with_pages(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: with_pages(entry) for title, entry in nav.items()}
    shown = [{group.title: group.uri} for group in GROUPS if group.section.placeholder == nav]
    return shown or nav


def pages(config: MkDocsConfig) -> Iterator[File]:
    """Yield the pages of the reference, its index first."""
    yield File.generated(config, "reference/README.md", content=_index())
    yield File.generated(config, "reference/command-line.md", content=commands.page())
    for group in GROUPS:
        yield File.generated(config, group.uri, content=_page(group))


@cache
def places() -> dict[str, str]:
    """The page of every public name, by its path, such as `ostinato.ReplayBuffer`."""
    found: dict[str, str] = {}
    objects: set[int] = set()
    for group in GROUPS:
        for name in group.names.split():
            found[f"ostinato.{name}"] = group.uri
            objects.add(id(_value(f"ostinato.{name}")))
    for group in GROUPS:
        for module in group.modules.split():
            for name in importlib.import_module(module).__all__:
                path = f"{module}.{name}"
                if id(_value(path)) not in objects:
                    found[path] = group.uri
                    objects.add(id(_value(path)))
    return found


def link_names(html: str) -> str:
    """Return HTML in which code that is a name of `ostinato`, or a call of one, links to its place in the reference."""

    def linked(found: re.Match[str]) -> str:
        path = f"ostinato.{found[1].removeprefix('ostinato.')}"
        if path not in places():
            return found[0]
        return f'<autoref identifier="{path}" optional><code>{found[1]}{found[2] or ""}</code></autoref>'

    return _in_text(_EACH_NAME, linked, html)


def link_guides(html: str) -> str:
    """Return HTML of a page of the reference in which paths such as docs/saving.md, in docstrings, are links."""

    def linked(found: re.Match[str]) -> str:
        return f'<a href="../../{found[1]}/{found[2] or ""}">{found[1].replace("-", " ")}</a>'

    return _in_text(_GUIDE, linked, html)


def _in_text(pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], html: str) -> str:
    """Replace what is no part of a link, a heading or a block of code."""
    parts = re.split(r"(<(?:a|pre|h\d)\b.*?</(?:a|pre|h\d)>)", html, flags=re.DOTALL)
    return "".join(part if i % 2 else pattern.sub(replace, part) for i, part in enumerate(parts))


def _value(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _page(group: Group) -> str:
    names = [path for path, uri in places().items() if uri == group.uri]
    lines = [f"# {group.title}", "", group.lead]
    if group.guide:
        lines[-1] += f" Guide: [{group.guide.removesuffix('.md')}](../{group.guide})."
    lines += ["", *_table(names), ""]
    if group.modules == "ostinato.errors":
        lines += ["```text", *_tree(), "```", ""]
    for path in names:
        lines += [f"::: {path}", "    options:", f"      inherited_members: {_inherited(path) or 'false'}"]
        if _value(path) is ReplayBuffer:
            lines += ["      group_by_category: false", f"      members: {_everyday_first(path)}"]
        lines.append("")
    return "\n".join(lines)


def _everyday_first(path: str) -> list[str]:
    """The public members of a class, those of a first program before all others."""
    own = [name for name in vars(_value(path)) if not name.startswith("_")]
    return list(dict.fromkeys([*_EVERYDAY, *own, *_inherited(path)]))


def _inherited(path: str) -> list[str]:
    """Names of the members of a class that come from a base without a place of its own; other bases are linked."""
    value = _value(path)
    public = {id(_value(other)) for other in places()}
    bases = [cls for cls in getattr(value, "__mro__", ())[1:] if cls.__module__.startswith("ostinato")]
    shown_elsewhere = {cls for base in bases if id(base) in public for cls in base.__mro__}
    names: dict[str, bool] = dict.fromkeys(vars(value) if bases else (), False)
    for cls in bases:
        for name in vars(cls):
            names.setdefault(name, cls not in shown_elsewhere)
    return [name for name, shown in names.items() if shown and not name.startswith("_")]


def _index() -> str:
    count = len(places())
    lines = [
        "# API reference",
        "",
        f"All {count} public names, by what they are for.",
        "",
    ]
    for section in (CALLED, IMPLEMENTED):
        lines += [f"## {section.title}", "", section.lead, ""]
        for group in (each for each in GROUPS if each.section is section):
            lines += [f"### [{group.title}]({group.uri.removeprefix('reference/')})", "", group.lead, ""]
            lines += [*_table([path for path, uri in places().items() if uri == group.uri]), ""]
    return "\n".join(lines)


def _table(names: list[str]) -> list[str]:
    rows = [f"| [`{path.removeprefix('ostinato.')}`][{path}] | {_summary(path)} |" for path in names]
    return ["| name | purpose |", "|---|---|", *rows]


def _summary(path: str) -> str:
    value = _value(path)
    text = inspect.getdoc(value) if inspect.isclass(value) or callable(value) else None
    first = " ".join((text or "").partition("\n\n")[0].split())
    return first.replace("|", "\\|")


def _tree() -> Iterator[str]:
    """Lines of the tree of errors, with the built-in that each also is."""
    errors = importlib.import_module("ostinato.errors")
    classes = [getattr(errors, name) for name in errors.__all__]

    def below(parent: type, indent: str) -> Iterator[str]:
        children = [cls for cls in classes if next((b for b in cls.__mro__[1:] if b in classes), None) is parent]
        for child in sorted(children, key=lambda cls: cls.__name__):
            built_in = [b.__name__ for b in child.__mro__ if b.__module__ == "builtins" and b not in _COMMON]
            yield f"{indent}{child.__name__}" + (f" ({', '.join(built_in)})" if built_in else "")
            yield from below(child, indent + "    ")

    yield "OstinatoError"
    yield from below(errors.OstinatoError, "    ")


_COMMON = (object, Exception, BaseException)
