"""What both wires' requests share: null means absent, wrong types are named, what the engine lacks is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from megatron_rollout.frontend.errors import bad_request, validation_message
from megatron_rollout.requests import SamplingParams


class WireModel(BaseModel):
    """A JSON object of a wire. A field that is null has its default; unknown fields are ignored unless a subclass says
    otherwise (routers and clients add their own)."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    #: Fields that ask for something the engine does not do, with the value that asks for nothing.
    refused: ClassVar[dict[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        present = {name: value for name, value in data.items() if value is not None}
        for name, neutral in cls.refused.items():
            value = present.pop(name, neutral)
            if value != neutral and value is not False and value != [] and value != {}:
                raise ValueError(f"{name} is not supported by the Megatron engine (got {_short(value)})")
        return present


def parse[M: WireModel](model: type[M], data: Any, where: str = "") -> M:
    """`data` as `model`; RequestError 400 with all findings in one line."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        message, field = validation_message(error)
        raise bad_request(f"{where}: {message}" if where else message, field) from None


def sampling_params(**arguments: Any) -> SamplingParams:
    """SamplingParams, or RequestError 400 with all that is wrong with them."""
    seed = arguments.get("seed")
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise bad_request(f"seed must fit 64 bits, got {seed}", "seed")
    try:
        return SamplingParams(**arguments)
    except ValueError as error:
        raise bad_request(str(error)) from None


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


#: A string or a list of strings; ids likewise.
Strings = Annotated[list[str], BeforeValidator(_one_or_many)]
Integers = Annotated[list[int], BeforeValidator(_one_or_many)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
