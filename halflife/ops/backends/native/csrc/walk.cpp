// The walk over the chunks of all sequences and heads, forward and backward, which every op on a state shares.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <numeric>

#include "chunk.h"
#include "entries.h"

namespace halflife {
namespace {

using at::Tensor;

constexpr int64_t kBorder = 4;    // chunks from one saved state to the next
constexpr int64_t kStates = 1 << 18;  // bytes of the states of all heads that a thread works on at a time
constexpr float kFloor = -110.f;  // below it a log-decay has the gradient 0

// ------------------------------------------------------------------------------------------ rows of tensors

// Tokens of one sequence and head of a tensor [B, T, H, D] (or [B, T, H]) with any strides but a dense last axis. Where
// it has G groups in the place of H heads, they are those of the head's group.
struct Rows {
  char* data = nullptr;
  at::ScalarType type = at::kFloat;
  int64_t step = 0, width = 0;  // bytes from token to token, and entries

  Rows() = default;
  Rows(const Tensor& x, int64_t batch, int64_t head, int64_t heads) {
    type = x.scalar_type();
    step = x.stride(1) * x.element_size();
    width = x.dim() == 4 ? x.size(3) : 1;
    const int64_t group = head * x.size(2) / heads;
    data = static_cast<char*>(x.data_ptr()) + (batch * x.stride(0) + group * x.stride(2)) * x.element_size();
  }
  char* at(int64_t token) const { return data + token * step; }
  float& number(int64_t token) const { return *reinterpret_cast<float*>(at(token)); }  // of float32 [B, T, H]

  // Rows of `out` from tokens, times `factor`; rows without a token become 0.
  void load(const Mat& out, int64_t first, int64_t count, int64_t column = 0, float factor = 1.f) const {
    for (int64_t i = 0; i < count; i++) {
      float* row = out.row(i) + column;
      load_row(type, at(first + i), row, width);
      if (factor != 1.f)
        for (int64_t j = 0; j < width; j++) row[j] *= factor;
    }
    for (int64_t i = count; i < out.rows; i++) std::fill_n(out.row(i) + column, width, 0.f);
  }
  void store(const Mat& in, int64_t first, int64_t count, int64_t column = 0) const {
    for (int64_t i = 0; i < count; i++) store_row(type, in.row(i) + column, at(first + i), width);
  }
};

// The matrix [states · K, V] of a sequence and head in a state tensor [N, H, states · K, V], in rows padded to 16.
struct StateRows {
  float* data;
  int64_t states, keys, values;

  StateRows(const Tensor& x, int64_t row, int64_t head, int64_t states)
      : data(x.data_ptr<float>() + (row * x.size(1) + head) * x.size(2) * x.size(3)), states(states),
        keys(x.size(2) / states), values(x.size(3)) {}
  void load(const Mat& out) const {
    fill(out, 0.f);
    each_row([&](int64_t from, int64_t to) { std::memcpy(out.row(to), data + from * values, values * sizeof(float)); });
  }
  void store(const Mat& in) const {
    each_row([&](int64_t from, int64_t to) { std::memcpy(data + from * values, in.row(to), values * sizeof(float)); });
  }

 private:
  template <class F>
  void each_row(F f) const {
    for (int64_t s = 0; s < states; s++)
      for (int64_t d = 0; d < keys; d++) f(s * keys + d, s * round_up(keys) + d);
  }
};

// ------------------------------------------------------------------------------------------------- a call

struct Call {
  std::string op;
  Tensor q, k, v;
  OptionalTensor g, beta, a, b, g_slow, gain;
  double scale;
  std::vector<int64_t> bounds;  // of packed sequences; empty for a batch of equal lengths
  Precision tokens;
  DecayKind kind;
  Sizes sizes;
  int64_t states, sequences, heads;
  int64_t part = 1;  // heads of which the backward pass adds the gradients of a group (see `choose_part`)

  Rows rows(const Tensor& x, int64_t n, int64_t head) const { return Rows(x, batch(n), head, heads); }
  // How many heads share a row of x [B, T, G, D].
  int64_t shared(const Tensor& x) const { return heads ? heads / x.size(2) : 1; }
  int64_t length(int64_t n) const { return bounds.empty() ? q.size(1) : bounds[n + 1] - bounds[n]; }
  int64_t chunks(int64_t n) const { return (length(n) + sizes.chunk - 1) / sizes.chunk; }
  int64_t batch(int64_t n) const { return bounds.empty() ? n : 0; }
  int64_t first_token(int64_t n) const { return bounds.empty() ? 0 : bounds[n]; }
  // The states saved before a sequence's: one for every kBorder chunks.
  int64_t borders(int64_t n) const { return (chunks(n) + kBorder - 1) / kBorder; }
  int64_t state_bytes() const { return states * sizes.keys * sizes.values * static_cast<int64_t>(sizeof(float)); }
  // At least the sum over all sequences, from shapes alone (`_num_borders` in __init__.py); pages that are not written
  // take no memory.
  int64_t max_borders() const {
    return bounds.empty() ? sequences * borders(0) : q.size(1) / (kBorder * kLane) + sequences;
  }
  int64_t first_border(int64_t n) const {
    if (bounds.empty()) return n * borders(0);
    int64_t sum = 0;
    for (int64_t m = 0; m < n; m++) sum += borders(m);
    return sum;
  }
};

Call make_call(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor a,
               OptionalTensor b, OptionalTensor g_slow, OptionalTensor gain, const OptionalTensor& cu_seqlens,
               double scale, int64_t chunk_size) {
  Call c{std::move(op), std::move(q), std::move(k), std::move(v), std::move(g), std::move(beta), std::move(a),
         std::move(b), std::move(g_slow), std::move(gain), scale};
  int64_t longest = c.q.size(1);
  if (cu_seqlens) {
    c.bounds = integers(*cu_seqlens);
    longest = 0;
    for (size_t n = 0; n + 1 < c.bounds.size(); n++) longest = std::max(longest, c.bounds[n + 1] - c.bounds[n]);
  }
  // The queries carry the scale, and stay bfloat16 if it is a power of two.
  int exponent;
  const bool exact = c.q.scalar_type() == at::kBFloat16 && std::abs(std::frexp(scale, &exponent)) == 0.5;
  c.tokens = exact ? Precision::bfloat16 : Precision::float32;
  c.kind = c.g_slow ? DecayKind::gate
           : !c.g   ? DecayKind::none
           : c.g->dim() == 4 ? DecayKind::vector : DecayKind::scalar;
  int64_t chunk = kLane;
  while (chunk < std::min(chunk_size, longest)) chunk *= 2;
  c.states = c.g_slow ? 2 : 1;
  c.sizes = {chunk, round_up(c.q.size(3)), round_up(c.v.size(3)), c.states};
  c.sequences = c.bounds.empty() ? c.q.size(0) : static_cast<int64_t>(c.bounds.size()) - 1;
  c.heads = c.v.size(2);
  return c;
}

constexpr int64_t kTasks = 32;  // into which the backward pass is cut, if there are as many heads

// Heads that share queries or keys must not write their gradients at the same time. The backward pass therefore does
// `part` heads in a row, and adds what they give to a group; the sums of the parts of a group are added at the end. The
// number depends on shapes alone, so that the number of threads changes no bit.
int64_t choose_part(const Call& c) {
  const int64_t queries = c.shared(c.q), keys = c.shared(c.k), all = std::lcm(queries, keys);
  const int64_t most = std::min(c.sequences * c.heads / kTasks, kStates / c.state_bytes());
  auto divides = [](int64_t a, int64_t b) { return a % b == 0 || b % a == 0; };
  int64_t part = std::max<int64_t>(1, std::min(all, most));
  while (all % part || !divides(queries, part) || !divides(keys, part)) part--;
  return part;
}

}  // namespace

Work& work_of_thread(Sizes n, int64_t wide) {
  thread_local std::unique_ptr<Work> work;
  if (!work || work->sizes != n || work->wide != wide) work = std::make_unique<Work>(n, wide);
  return *work;
}

namespace {

std::unique_ptr<Chunk> make_chunk(const Call& c, bool grads) {
  const bool dplr = c.a.has_value(), delta = c.beta.has_value();
  auto chunk = (dplr ? make_dplr : delta ? make_delta : make_linear)(c.tokens, c.kind, c.sizes);
  if (grads) chunk->make_grads();
  if (c.gain) chunk->gain.resize(c.sizes.chunk);
  return chunk;
}

// ---------------------------------------------------------------------------------------- one sequence and head

void load_vector(std::vector<float>& out, const Rows& rows, int64_t first, int64_t count) {
  for (size_t i = 0; i < out.size(); i++) out[i] = static_cast<int64_t>(i) < count ? rows.number(first + i) : 0.f;
}

// Load the inputs of chunk `index` of sequence n.
void load(const Call& c, Chunk& chunk, int64_t n, int64_t head, int64_t index) {
  const int64_t first = c.first_token(n) + index * c.sizes.chunk;
  const int64_t count = std::min(c.sizes.chunk, c.length(n) - index * c.sizes.chunk);
  c.rows(c.q, n, head).load(chunk.q, first, count, 0, static_cast<float>(c.scale));
  c.rows(c.k, n, head).load(chunk.k, first, count);
  c.rows(c.v, n, head).load(chunk.v, first, count);
  if (c.gain) {
    load_vector(chunk.gain, c.rows(*c.gain, n, head), first, count);
    scale_rows(chunk.v, chunk.v, chunk.gain.data());
  }
  if (c.a) {
    c.rows(*c.a, n, head).load(chunk.a, first, count);
    c.rows(*c.b, n, head).load(chunk.b, first, count);
  }
  if (c.g_slow) c.rows(*c.g_slow, n, head).load(chunk.decay->log_decays(), first, count);
  if (c.g) c.rows(*c.g, n, head).load(chunk.decay->log_decays(), first, count, c.g_slow ? 1 : 0);
  if (c.beta) load_vector(chunk.beta, c.rows(*c.beta, n, head), first, count);
}

// The walk of some heads of one sequence. Its chunks are done in groups, which share the memory of `chunks`. All heads
// do a group before any does the next, because the rows of neighbouring heads are neighbours in memory. Where there are
// fewer heads than threads, the threads share the chunks of a group and the columns of its states.
class Walk {
 public:
  Walk(const Call& call, int64_t group, bool grads) : c(call) {
    for (int64_t i = 0; i < group; i++) chunks.push_back(make_chunk(call, grads));
    if (grads && c.shared(c.q) > 1) make(query_sums, group, c.sizes.chunk, c.sizes.keys);
    if (grads && c.shared(c.k) > 1) make(key_sums, group, c.sizes.chunk, c.sizes.keys);
  }

  void forward(int64_t n, int64_t first_head, int64_t last_head, const Tensor& initial, const Tensor& final,
               const Tensor& borders, const Tensor& o) {
    make_states(states, last_head - first_head);
    for (int64_t head = first_head; head < last_head; head++)
      StateRows(initial, n, head, c.states).load(states[head - first_head]);
    const int64_t total = c.chunks(n), group = static_cast<int64_t>(chunks.size());
    for (int64_t start = 0; start < total; start += group)
      for (int64_t head = first_head; head < last_head; head++) {
        const Mat state = states[head - first_head];
        const Rows out = c.rows(o, n, head);
        const int64_t count = std::min(group, total - start);
        if (borders.defined() && start % kBorder == 0)
          StateRows(borders, c.first_border(n) + start / kBorder, head, c.states).store(state);
        run(count, [&](int64_t i) {
          load(c, *chunks[i], n, head, start + i);
          chunks[i]->prepare();
        });
        walk(state, count);
        run(count, [&](int64_t i) {
          chunks[i]->finish();
          const int64_t token = (start + i) * c.sizes.chunk;
          out.store(chunks[i]->work().o, c.first_token(n) + token, std::min(c.sizes.chunk, c.length(n) - token));
        });
      }
    for (int64_t head = first_head; head < last_head; head++)
      StateRows(final, n, head, c.states).store(states[head - first_head]);
  }

  // `grads` are those of q, k, v, g, beta, a, b, g_slow, gain; undefined ones are left out. The parts of q and k stand
  // one after the other along the first axis.
  void backward(int64_t n, int64_t first_head, int64_t last_head, const Tensor& borders, const Tensor& dout,
                const Tensor& dfinal, const Tensor& dinitial, const std::vector<Tensor>& grads) {
    make_states(states, 1);
    make_states(dstates, last_head - first_head);
    for (int64_t head = first_head; head < last_head; head++)
      StateRows(dfinal, n, head, c.states).load(dstates[head - first_head]);
    const int64_t total = c.chunks(n), group = static_cast<int64_t>(chunks.size());
    for (int64_t start = (total - 1) / group * group; total > 0 && start >= 0; start -= group)
      for (int64_t head = first_head; head < last_head; head++) {
        const Mat state = states[0], dstate = dstates[head - first_head];
        const Rows given = c.rows(dout, n, head);
        const int64_t count = std::min(group, total - start);
        StateRows(borders, c.first_border(n) + start / kBorder, head, c.states).load(state);
        run(count, [&](int64_t i) {
          load(c, *chunks[i], n, head, start + i);
          const int64_t token = (start + i) * c.sizes.chunk;
          given.load(chunks[i]->dout, c.first_token(n) + token, std::min(c.sizes.chunk, c.length(n) - token));
          chunks[i]->prepare();
        });
        walk(state, count);
        run(count, [&](int64_t i) { chunks[i]->prepare_back(); });
        columns([&](int64_t first, int64_t width) {
          for (int64_t i = count - 1; i >= 0; i--) chunks[i]->walk_back(dstate, first, width);
        });
        run(count, [&](int64_t i) {
          chunks[i]->finish_back();
          store(i, n, head, start + i, grads);
        });
      }
    for (int64_t head = first_head; head < last_head; head++)
      StateRows(dinitial, n, head, c.states).store(dstates[head - first_head]);
  }

 private:
  static void make(std::vector<Buffer>& buffers, int64_t count, int64_t rows, int64_t cols) {
    while (static_cast<int64_t>(buffers.size()) < count) buffers.emplace_back(rows, cols);
  }
  void make_states(std::vector<Buffer>& buffers, int64_t count) const {
    make(buffers, count, c.states * c.sizes.keys, c.sizes.values);
  }

  template <class F>
  void run(int64_t count, F f) const {
    at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) f(i);
      release(c.tokens);
    });
  }
  // The columns of the states in fixed pieces, so that the cut does not depend on the number of threads.
  template <class F>
  void columns(F f) const {
    constexpr int64_t kPiece = 2 * kLane;
    const int64_t values = c.sizes.values;
    if (at::in_parallel_region() || at::get_num_threads() == 1) return f(0, values);
    at::parallel_for(0, (values + kPiece - 1) / kPiece, 1, [&](int64_t first, int64_t last) {
      f(first * kPiece, std::min(last * kPiece, values) - first * kPiece);
      release(c.tokens);
    });
  }
  void walk(const Mat& state, int64_t count) {
    columns([&](int64_t first, int64_t width) {
      for (int64_t i = 0; i < count; i++) chunks[i]->walk(state, first, width);
    });
  }

  // Store the gradients of `chunks[i]`, which is chunk `index` of sequence n.
  void store(int64_t i, int64_t n, int64_t head, int64_t index, const std::vector<Tensor>& grads) {
    const Chunk& chunk = *chunks[i];
    const int64_t first = c.first_token(n) + index * c.sizes.chunk;
    const int64_t count = std::min(c.sizes.chunk, c.length(n) - index * c.sizes.chunk);
    const Work& w = chunk.work();
    const Vec scale(static_cast<float>(c.scale));
    each([scale](Vec x) { return x * scale; }, Mat(w.dq));
    store_shared(grads[0], w.dq, query_sums, i, n, head, first, count);
    store_shared(grads[1], w.dk, key_sums, i, n, head, first, count);
    if (c.gain) store_gain(grads[8], chunk, n, head, first, count);
    c.rows(grads[2], n, head).store(w.dv, first, count);
    if (c.g) {
      const int64_t column = c.g_slow ? 1 : 0;
      const Mat dg = w.dg, g = chunk.decay->log_decays();
      for (int64_t t = 0; t < count; t++)
        for (int64_t d = 0; d < g.cols; d++)
          if (g.row(t)[d] < kFloor) dg.row(t)[d] = 0.f;
      c.rows(grads[3], n, head).store(dg, first, count, column);
      if (c.g_slow) c.rows(grads[7], n, head).store(dg, first, count);
    }
    if (c.beta) {
      const Rows out = c.rows(grads[4], n, head);
      for (int64_t t = 0; t < count; t++) out.number(first + t) = w.dbeta[t];
    }
    if (c.a) {
      c.rows(grads[5], n, head).store(w.da, first, count);
      c.rows(grads[6], n, head).store(w.db, first, count);
    }
  }
  // Turn the gradients of gain ⊙ v into those of v, and store those of the gain.
  void store_gain(const Tensor& out, const Chunk& chunk, int64_t n, int64_t head, int64_t first, int64_t count) const {
    const Rows to = c.rows(out, n, head);
    const Mat v = chunk.v, dv = chunk.work().dv;
    c.rows(c.v, n, head).load(v, first, count);
    for (int64_t i = 0; i < count; i++) to.number(first + i) = dot(v.row(i), dv.row(i), v.cols);
    scale_rows(dv, dv, chunk.gain.data());
  }
  // Add what the heads of a part give to their group, and store the sum with the last of them.
  void store_shared(const Tensor& out, const Mat& d, std::vector<Buffer>& sums, int64_t i, int64_t n, int64_t head,
                    int64_t first, int64_t count) const {
    const int64_t shared = c.shared(out), heads = std::min(shared, c.part), place = head % shared;
    if (shared == 1) return c.rows(out, n, head).store(d, first, count);
    const Mat sum = sums[i];
    if (place % heads == 0)
      copy(sum, d);
    else
      add(sum, d);
    const int64_t batch = place / heads * c.q.size(0) + c.batch(n);
    if ((place + 1) % heads == 0) Rows(out, batch, head, c.heads).store(sum, first, count);
  }

  const Call& c;
  std::vector<std::unique_ptr<Chunk>> chunks;
  std::vector<Buffer> states, dstates;
  std::vector<Buffer> query_sums, key_sums;  // of the gradients of each chunk of a group, where heads share them
};

// Run `f(walk, sequence, first head, last head)` for all sequences and heads: in parallel over them, or one after the
// other with threads inside where they are too few.
template <class F>
void each_head(const Call& c, bool grads, F f) {
  const int64_t part = grads ? c.part : 1, tasks = c.sequences * c.heads / part, threads = at::get_num_threads();
  const int64_t most = std::max<int64_t>(1, kStates / c.state_bytes() / part) * part;
  auto heads = [&](Walk& walk, int64_t first, int64_t last) {
    for (int64_t i = first * part; i < last * part;) {
      const int64_t n = i / c.heads, head = i % c.heads;
      const int64_t count = std::min({last * part - i, c.heads - head, most});
      f(walk, n, head, head + count);
      i += count;
    }
  };
  if (tasks >= threads) {
    at::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
      Walk walk(c, grads ? kBorder : 1, grads);
      heads(walk, first, last);
      release(c.tokens);
    });
  } else if (tasks > 0) {
    Walk walk(c, kBorder, grads);
    heads(walk, 0, tasks);
  }
}

// --------------------------------------------------------------------------------------------- custom ops

std::tuple<Tensor, Tensor, Tensor> forward(
    std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor a,
    OptionalTensor b, OptionalTensor g_slow, OptionalTensor gain, Tensor initial, OptionalTensor cu_seqlens,
    double scale, int64_t chunk_size, bool save) {
  const Call c = make_call(op, q, k, v, g, beta, a, b, g_slow, gain, cu_seqlens, scale, chunk_size);
  Tensor o = like(v), final = at::empty_like(initial);
  Tensor borders = at::empty({save ? c.max_borders() : 0, c.heads, initial.size(2), initial.size(3)}, initial.options());
  each_head(c, false, [&](Walk& walk, int64_t n, int64_t first, int64_t last) {
    walk.forward(n, first, last, initial, final, save ? borders : Tensor(), o);
  });
  return {o, final, borders};
}

std::vector<Tensor> backward(std::string op, Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta,
                             OptionalTensor a, OptionalTensor b, OptionalTensor g_slow, OptionalTensor gain,
                             Tensor borders, OptionalTensor cu_seqlens, double scale, int64_t chunk_size, Tensor dout,
                             Tensor dfinal) {
  Call c = make_call(op, q, k, v, g, beta, a, b, g_slow, gain, cu_seqlens, scale, chunk_size);
  c.part = choose_part(c);
  const Tensor none = at::empty({0}, q.options());
  auto like = [&](const OptionalTensor& x) { return x ? at::empty(x->sizes(), x->options()) : none; };
  auto parts = [&](const Tensor& x) { return std::max<int64_t>(1, c.shared(x) / c.part); };
  auto like_parts = [&](const Tensor& x) {
    if (parts(x) == 1) return like(x);
    return at::empty({parts(x) * x.size(0), x.size(1), x.size(2), x.size(3)}, x.options().dtype(at::kFloat));
  };
  std::vector<Tensor> grads{like_parts(q), like_parts(k), like(v),      like(g),   like(beta),
                            like(a),       like(b),       like(g_slow), like(gain)};
  Tensor dinitial = at::empty_like(dfinal);
  each_head(c, true, [&](Walk& walk, int64_t n, int64_t first, int64_t last) {
    walk.backward(n, first, last, borders, dout, dfinal, dinitial, grads);
  });
  for (int64_t i : {0, 1})
    if (const Tensor x = i ? k : q; parts(x) > 1)
      grads[i] = grads[i].unflatten(0, {parts(x), x.size(0)}).sum(0).to(x.scalar_type());
  grads.push_back(dinitial);
  return grads;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "state_op(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? a, Tensor? b, Tensor? g_slow, "
      "Tensor? gain, Tensor initial, Tensor? cu_seqlens, float scale, int chunk_size, bool save) "
      "-> (Tensor, Tensor, Tensor)",
      torch::dispatch(at::kCPU, forward));
  m.def(
      "state_op_backward(str op, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? a, Tensor? b, "
      "Tensor? g_slow, Tensor? gain, Tensor borders, Tensor? cu_seqlens, float scale, int chunk_size, Tensor dout, "
      "Tensor dfinal) -> Tensor[]",
      torch::dispatch(at::kCPU, backward));
}

}  // namespace halflife
