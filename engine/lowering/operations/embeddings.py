"""Operations that fill the hidden states: rows of tables, media, and states of another model."""

from typing import ClassVar

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Value
from engine.lowering.operations.weights import AudioWeights, Tables, TokenTable
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class Input(Operation):
    """y = the rows that the caller gives, such as embedded patches of images."""

    y: Value


@declared(frozen=True, kw_only=True)
class Embed(Operation):
    """y = scale · row of the token + row of its position + row of its segment; only the row of the token if it has
    another width than the hidden states."""

    y: Value
    weight: Tables


@declared(frozen=True, kw_only=True)
class LookUpPositions(Operation):
    """y = row of the position. The tables of an embedding with projected rows are used separately."""

    y: Value
    weight: Tables


@declared(frozen=True, kw_only=True)
class InsertMedia(Operation):
    """x = the first columns of the embeddings of media, for the tokens of media in a step."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value


@declared(frozen=True, kw_only=True)
class EmbedMedia(Operation):
    """y = the embeddings of media, and 0 for tokens that are not of media."""

    y: Value


@declared(frozen=True, kw_only=True)
class FillMedia(Operation):
    """x = the row of one token for the tokens of media in a step."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    weight: TokenTable
    token: int


@declared(frozen=True, kw_only=True)
class ReadStates(Operation):
    """y = the hidden states that the caller of a prediction head gives. skips_first: x = 0 for tokens at position 0."""

    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    y: Value
    skips_first: bool = True


@declared(frozen=True, kw_only=True)
class AddMedia(Operation):
    """x += columns of the embeddings of media, from `first` on, for the tokens of media in a step."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    first: int


@declared(frozen=True, kw_only=True)
class LookUp(Operation):
    """y = scale · row of the token. partial: the table lacks some tokens, which have its first row."""

    y: Value
    weight: TokenTable
    partial: bool = False


@declared(frozen=True, kw_only=True)
class EmbedAudio(Operation):
    """y = embeddings of the spectrograms of a step."""

    y: Value
    weight: AudioWeights
