"""The requests that the server reads. A parameter that it does not know, or cannot honour, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halflife.serve.jobs import Settings

MAX_STOPS = 4
Ids = list[Annotated[int, Field(ge=0)]]
Zero = Annotated[float, Field(ge=0, le=0)]  # penalties that are not zero are refused


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Request):
    """Options of a stream."""

    include_usage: bool = False


class Sampling(_Request):
    """Parameters that every request for text has."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # a name for the client's own records
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0

    def settings(self, max_tokens: int, logprobs: int | None) -> Settings:
        """Return the settings of the engine. Raise ValueError if a stop string is empty, or there are too many."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS or not all(stops):
            raise ValueError(f"stop must be at most {MAX_STOPS} strings that are not empty")
        return Settings(max_tokens, self.temperature, self.top_p, self.seed, stops, logprobs, self.n)

    @property
    def with_usage(self) -> bool:
        """Whether the last event of a stream reports the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class Generate(Sampling):
    """Continue a session."""

    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Literal[1] = 1


class Completion(Sampling):
    """Continue one or more texts."""

    prompt: str | Ids | list[str] | list[Ids]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        many = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]  # pyright: ignore[reportReturnType]


class TextPart(_Request):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. Further keys go to the tokenizer's template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message with its content as one text."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        return {**self.model_dump(), "content": text}


class Chat(Sampling):
    """Answer a chat."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class Text(_Request):
    """Text or token ids that a session reads."""

    input: str | Ids = ""
