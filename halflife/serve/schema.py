"""The requests that the server reads. A parameter that it does not know, or cannot honour, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from halflife.serve.jobs import Settings

MAX_STOPS = 4
Zero = Annotated[float, Field(ge=0, le=0)]  # penalties that are not zero are refused
Nothing = Annotated[list | dict, Field(max_length=0)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}


class StreamOptions(_Request):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampling(_Request):
    """Parameters that every request for text has."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0  # 0 takes the likeliest token
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # a name for the client's own records
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Nothing | None = None

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
    """Continue one or more texts. Without a prompt, a text begins as a document does, after the end of another one."""

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    best_of: Annotated[int, Field(ge=1)] | None = None

    def prompts(self, eos: int | None) -> list[str | list[int]]:
        """Return the prompts one by one. Raise ValueError if there is none, and no token `eos` to begin after."""
        if self.prompt is None:
            if eos is None:
                raise ValueError("give a prompt: the tokenizer has no end token, after which a text could begin")
            return [[eos]]
        many = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]  # pyright: ignore[reportReturnType]

    def settings(self, max_tokens: int, logprobs: int | None) -> Settings:
        """Return the settings of the engine. Raise ValueError as above, or if `best_of` is not n."""
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of must be n, {self.n}, because no texts are chosen from; got {self.best_of}")
        return super().settings(max_tokens, logprobs)


class TextPart(_Request):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class TextFormat(_Request):
    """The form of an answer that is any text."""

    type: Literal["text"]


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
    # What changes no answer is taken, and of the others what asks for nothing.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] = False
    modalities: list[Literal["text"]] | None = None
    response_format: TextFormat | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
    prompt_cache_options: None = None


class Text(_Request):
    """Text or token ids that a session reads."""

    input: str | list[int] = ""
