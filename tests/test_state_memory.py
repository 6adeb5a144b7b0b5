"""A state keeps no memory but its own: not the activations of a long prompt, nor the tokens of the caller."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_close, assert_raises, assert_same, cases, generator
from pairwise import slow_beyond
from test_registry import KINDS, NAMES, build, tokens

from halflife import Session, layers
from halflife.data.tokenizers import load_tokenizer
from halflife.hf import HalflifeForCausalLM
from halflife.hf.cache import CACHE
from halflife.layers.attention import ROOM
from halflife.models.states import size
from halflife.serve.engine import Engine
from halflife.serve.jobs import Done, Failed, Job, Settings

LENGTH = 80
each_state = pytest.mark.parametrize("name", slow_beyond(KINDS, NAMES))
LAYOUTS = {
    "rows": {},
    "packed": {"cu_seqlens": torch.tensor([0, 30, 30, 31, LENGTH])},
    "padded": {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[50], [0]])).long()},
}


def assert_owned(state):
    """Every tensor of a state has the memory of its entries, and shares none but the positions, which layers share.

    Caches have room for the next tokens beside it.
    """
    room = 0
    for layer, parts in enumerate(state):
        for name, x in parts.items():
            beside = x.untyped_storage().nbytes() - x.nbytes
            most = ROOM * x.nbytes // x.shape[1] if name in ("keys", "values", "forget") else 0
            assert 0 <= beside <= most, (layer, name, tuple(x.shape))
            room += beside
    named = [(name.endswith("position"), x) for parts in state for name, x in parts.items()]
    positions = {x.data_ptr(): x.nbytes for shared, x in named if shared}
    assert size(state) - room == sum(x.nbytes for shared, x in named if not shared) + sum(positions.values())


def memory(*tensors):
    return {x.untyped_storage().data_ptr() for x in tensors if x.numel()}


@each_state
def test_a_state_owns_its_memory(name):
    model = build(name).eval()
    with torch.no_grad():
        for layout, options in LAYOUTS.items():
            _, state = model.hidden(tokens(1 if layout == "packed" else 2, LENGTH), **options)
            assert_owned(state)
            for length in (3, 1, 0):
                _, new = model.hidden(tokens(len(state[0]["position"]), length), state)
                assert_owned(new)


@each_state
def test_a_state_with_gradients_owns_its_memory(name):
    """The state of a first piece of training, whose inputs are embeddings: it shares no memory with them."""
    model = build(name)
    x = torch.randn(2, LENGTH, model.config.hidden_size, requires_grad=True, generator=generator(name))
    _, state = model.hidden(x)
    assert_owned(state)
    held = memory(*(part for layer in state for part in layer.values()))
    assert not held & memory(x, *model.parameters(), *model.buffers())
    sum(part.sum() for layer in state for part in layer.values() if part.requires_grad).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@each_state
def test_sessions_and_caches_own_their_memory(name, tmp_path):
    model, ids = build(name).eval(), tokens(LENGTH)
    session = Session(model, piece_size=50).feed(ids)
    for each in (session, session.fork().feed(ids[:1]), Session(model).load(session.save(tmp_path / "state"))):
        assert_owned(each.state)
        assert each.next_logits.untyped_storage().nbytes() == each.next_logits.nbytes
    with torch.no_grad():
        cache = HalflifeForCausalLM.of(model)(torch.stack([ids, ids]), use_cache=True).get(CACHE)
    assert_owned(cache.state)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert_owned(cache.state)


@each_state
def test_the_server_keeps_states_that_own_their_memory(name):
    """Prompts are read together, and their states are rows of one batch until each is stored."""
    model, events = build(name).eval(), []
    engine = Engine(model, load_tokenizer("bytes"), cache_bytes=1 << 24)
    for _ in range(2):
        settings = Settings(max_tokens=2, temperature=0.0, n=2)
        engine.submit(Job(tokens(LENGTH).tolist(), settings, events.append, keep=True))
    while len(done := [event for event in events if isinstance(event, Done)]) < 2:
        assert not any(isinstance(event, Failed) for event in events), events
        engine.turn()
    assert len(engine.prefixes) >= 2
    prefixes = [*engine.prefixes._entries.values(), *(event.after for event in done)]
    for prefix in prefixes:
        assert_owned(prefix.state)
        assert prefix.hidden.untyped_storage().nbytes() == prefix.hidden.nbytes
    stored = engine.prefixes._entries.values()
    assert engine.prefixes.bytes == sum(size(prefix.state) + prefix.hidden.nbytes for prefix in stored)


@pytest.mark.parametrize("name", ["llama", "fox"])
def test_tokens_take_the_room_of_a_cache(name):
    """Tokens are written into one buffer, until a state goes on in two ways; no state and no gradient changes."""
    model, ids = build(name).eval().double(), tokens(2, 40)
    others = torch.cat([ids[:, :30], (ids[:, 30:] + 1) % model.config.vocab_size], 1)

    def keys(state):
        return state[0]["keys"].untyped_storage().data_ptr()

    with torch.no_grad():
        expected, expected_others = model(ids)[0], model(others)[0]
        _, at_30 = model(ids[:, :30])
        before = [{key: x.clone() for key, x in layer.items()} for layer in at_30]
        first, second, places = at_30, at_30, []
        for t in range(30, 38):
            logits, first = model(ids[:, t : t + 1], first)
            other, second = model(others[:, t : t + 1], second)
            assert_close(logits[:, 0], expected[:, t], 1e-12)
            assert_close(other[:, 0], expected_others[:, t], 1e-12)
            places.append((keys(first), keys(second)))
        for layer, saved in zip(at_30, before, strict=True):
            assert_same(layer, saved)
        assert len(set(places)) == 1
        assert places[0][0] != places[0][1]
    logits, _ = model(ids[:, 38:], first)
    with torch.no_grad():
        model(ids[:, 38:], first)
    logits.square().sum().backward()  # what it kept has not been written over
    assert_close(logits, expected[:, 38:], 1e-12)
    with torch.inference_mode():
        _, inside = model(ids[:, 38:39], first)
    logits, _ = model(ids[:, 39:], inside)
    with torch.no_grad():
        assert_close(model(ids[:, 39:], inside)[0], logits, 1e-12)


def test_states_have_transforms_of_torch_func():
    model = build("rwkv7")
    mixer = model.blocks[0].mixer
    x = torch.randn(3, 5, model.config.hidden_size, generator=generator("transforms"))
    gradient = torch.func.vmap(torch.func.grad(lambda x: mixer(x[None])[1]["shift"].sum()))(x)
    assert torch.equal(gradient, torch.zeros_like(x).index_fill(1, torch.tensor([4]), 1.0))


def test_threads_that_go_on_from_one_state_share_no_slots():
    mixer = layers.build("attention", hidden_size=8, num_heads=2).double()
    x = torch.randn(8, 1, 30, 8, dtype=torch.double, generator=generator("threads"))
    with torch.no_grad():
        _, state = mixer(x[0])

        def read(rows):
            y, after = [], state
            with torch.no_grad():  # each thread has its own mode
                for token in rows.split(1, 1):
                    out, after = mixer(token, after)
                    y.append(out)
            return torch.cat(y, 1)

        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(read, x)]
        for rows, y in zip(x, found, strict=True):
            assert_close(y, mixer(torch.cat([x[0], rows], 1))[0][:, 30:], 1e-12)


@pytest.mark.parametrize("window", [None, 5])
def test_caches_have_vmap_where_the_tokens_are_the_same(window):
    mixer, draws = layers.build("fox", hidden_size=8, num_heads=2, window=window).double(), generator("caches")
    x = torch.randn(1, 3, 8, dtype=torch.double, generator=draws)
    _, state = mixer(x)
    keys = torch.randn(2, *state["keys"].shape, dtype=torch.double, generator=draws)

    def read(keys):
        return mixer(x, {**state, "keys": keys})[0]

    assert_close(torch.vmap(read)(keys), torch.stack([read(each) for each in keys]), 1e-12)


@cases("change", lambda x: x[:1], lambda x: x[:, :, :1], lambda x: x[..., :1])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_of_another_shape_is_an_error(packed, length, change):
    """It is not repeated along its axes until it fits."""
    mixer = layers.build("attention", hidden_size=8, num_heads=2)
    x = torch.zeros(3, length, 8)
    bounds = torch.arange(4) * length
    with torch.no_grad():
        _, state = mixer(x)
        state = {name: part if name == "position" else change(part) for name, part in state.items()}
        given = (x.view(1, -1, 8), state, bounds) if packed else (x, state)
        assert_raises(RuntimeError, "must match", mixer, *given)
