"""How many nodes a job is to have: a number, or a range of which it takes what there is.

A number stays a number, in Python as in JSON. A range is text, `14-16`, as Slurm itself writes it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

MOST = 100_000

_RANGE = re.compile(r"\s*([0-9]{1,9})\s*-\s*([0-9]{1,9})\s*")
_NUMBER = re.compile(r"\s*[+-]?[0-9]+(\.[0-9]*)?\s*")


def bounds(nodes: int | str) -> tuple[int, int]:
    """The least and the most of a count that was validated; the same number where it is one."""
    if isinstance(nodes, int):
        return nodes, nodes
    least, _, most = nodes.partition("-")
    return int(least), int(most)


def spell(least: int, most: int) -> str:
    """The count as Slurm's `--nodes` takes it."""
    return str(most) if least == most else f"{least}-{most}"


def _checked(value: object, as_number: core_schema.ValidatorFunctionWrapHandler) -> int | str:
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        number: int = as_number(value)
        return number
    found = _RANGE.fullmatch(value)
    if found is None:
        raise ValueError(
            f'value "{value}"; must be a whole number, or the least and the most joined by a "-"; '
            "write it as in 16 or 14-16"
        )
    least, most = int(found[1]), int(found[2])
    if least > most:
        raise ValueError(
            f'value "{value}"; must name the least first, and {least} is more than {most}; write '
            f"{most}-{least}"
        )
    if least < 1 or most > MOST:
        raise ValueError(
            f'value "{value}"; must be within 1 and {MOST}; '
            + ("raise the least" if least < 1 else "lower the most")
        )
    return most if least == most else spell(least, most)


class _NumberOrRange:
    """Pydantic's view of it: one type with one message, and not a union with one for each part."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            _checked,
            core_schema.int_schema(ge=1, le=MOST),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MOST},
                {"type": "string", "pattern": "^[0-9]+ *- *[0-9]+$"},
            ]
        }


NodeCount = Annotated[int | str, _NumberOrRange]
