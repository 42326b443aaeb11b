"""An extension of griffe: methods of remote buffers, which are made of those of `ReplayBuffer` by a call."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import griffe

_MADE = re.compile(r"(?:remote|unavailable|in_actor|RemoteProperty\[(.*)\])\(|dumps$|loads$")
"""Values of the attributes of a class that are methods or properties."""


class RemoteMethods(griffe.Extension):
    """Shows attributes such as `delete = remote(ReplayBuffer.delete)` as the methods that they are."""

    def on_class_members(self, *, cls: griffe.Class, agent: Any, **_: Any) -> None:  # type: ignore[override]
        """Replace the attributes of a class, as the source has them, by the members of the class when it runs."""
        made = [each for each in cls.members.values() if each.is_attribute and _MADE.match(str(each.value))]
        if not cls.module.path.startswith("ostinato.distributed.") or not made:
            return
        runtime = griffe.dynamic_import(cls.path, sys.path)
        for attribute in made:
            value = vars(runtime)[attribute.name]
            shown: Any = attribute if isinstance(value, property) else _function(attribute, value)
            text = inspect.cleandoc(value.__doc__ or "")
            shown.docstring = griffe.Docstring(
                text, parent=shown, parser=agent.docstring_parser, parser_options=agent.docstring_options
            )
            if shown is attribute:
                kind = _MADE.match(str(attribute.value))
                shown.annotation, shown.value, shown.labels = kind and kind[1], None, {"property"}
            else:
                cls.set_member(attribute.name, shown)


def _function(attribute: Any, value: Any) -> griffe.Function:
    """Return a function with the signature that a method has when the program runs."""
    signature = inspect.signature(value)
    parameters = [
        griffe.Parameter(
            name,
            kind=griffe.ParameterKind(given.kind.description),
            annotation=None if given.annotation is given.empty else given.annotation,
            default=None if given.default is given.empty else repr(given.default),
        )
        for name, given in signature.parameters.items()
    ]
    return griffe.Function(
        attribute.name,
        parameters=griffe.Parameters(*parameters),
        returns=signature.return_annotation,
        lineno=attribute.lineno,
        endlineno=attribute.endlineno,
    )
