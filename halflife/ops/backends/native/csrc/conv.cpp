// The short causal convolution (halflife/ops/conv.py), with its bias and SiLU:
//
//   a_t = Σ_{i<W} w_i ⊙ x_{t−W+1+i} + bias,      y_t = a_t or silu(a_t)
//
// One thread does a block of tokens of a tile of channels at a time. It copies the inputs of the block and the W − 1
// inputs before it, from the state at the start of a sequence, into strips: the tokens of one vector of channels, one
// after the other, in float32. The backward pass computes a_t again from the inputs.
#include <torch/library.h>

#include <cmath>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;

constexpr int64_t kTile = 256;  // channels of a tile
constexpr int64_t kAlone = 1 << 14;  // entries that one thread does sooner than it would wake another

template <class T>
struct Tokens {
  T* first;
  int64_t step;
  T* row(int64_t token) const { return first + token * step; }
};

struct Call {
  Tensor x, taps, bias;  // taps [W, D] and bias [D] in float32
  Tensor state;          // [N, D, W − 1] in x's dtype
  std::vector<int64_t> bounds;
  int64_t width, channels, sequences;
  bool activated;

  int64_t before() const { return width - 1; }
  int64_t length(int64_t n) const { return bounds.empty() ? x.size(1) : bounds[n + 1] - bounds[n]; }
  int64_t batch(int64_t n) const { return bounds.empty() ? n : 0; }
  int64_t first(int64_t n) const { return bounds.empty() ? 0 : bounds[n]; }
  int64_t tiles() const { return (channels + kTile - 1) / kTile; }

  // The rows of the tokens of sequence n, in x or a tensor like it.
  template <class T>
  Tokens<T> tokens(const Tensor& like_x, int64_t n) const {
    const int64_t step = like_x.stride(1);
    return {like_x.data_ptr<T>() + batch(n) * like_x.stride(0) + first(n) * step, step};
  }
  // The entry of the state that is the input `token` < 0 of sequence n, for channel 0; channels are W − 1 apart.
  template <class T>
  T* earlier(const Tensor& like_state, int64_t n, int64_t token) const {
    return like_state.data_ptr<T>() + n * channels * before() + before() + token;
  }
};

Tensor dense_rows(const Tensor& x) { return x.size(-1) < 2 || x.stride(-1) == 1 ? x : x.contiguous(); }

Call make_call(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& state,
               const OptionalTensor& cu_seqlens, bool activated) {
  Call c{dense_rows(x), weight.to(at::kFloat).t().contiguous(),
         bias ? bias->to(at::kFloat).contiguous() : at::zeros({weight.size(0)}, weight.options().dtype(at::kFloat)),
         state.to(x.scalar_type()).contiguous()};
  if (cu_seqlens) c.bounds = integers(*cu_seqlens);
  c.width = weight.size(1);
  c.channels = weight.size(0);
  c.sequences = state.size(0);
  c.activated = activated;
  return c;
}

// A block of tokens of a sequence. `index` counts all blocks.
struct Piece {
  int64_t sequence, start, stop, index;
};

std::vector<Piece> make_pieces(const Call& c) {
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < c.sequences; n++)
    for (int64_t start = 0; start < c.length(n); start += kBlock)
      pieces.push_back({n, start, std::min(start + kBlock, c.length(n)), static_cast<int64_t>(pieces.size())});
  return pieces;
}

// A tile of channels and its strips. A row of a strip has kWidth entries.
struct Tile {
  int64_t first, count, strips;
  Buffer taps;  // for each strip the rows of the taps, and that of the bias

  Tile(const Call& c, int64_t index)
      : first(index * kTile), count(std::min(kTile, c.channels - first)), strips((count + kWidth - 1) / kWidth),
        taps(strips * (c.width + 1), kWidth) {
    for (int64_t n = 0; n < strips; n++) {
      const int64_t d = first + n * kWidth, filled = lanes(n * kWidth, count);
      for (int64_t i = 0; i < c.width; i++)
        std::copy_n(c.taps.data_ptr<float>() + i * c.channels + d, filled, taps->row(n * (c.width + 1) + i));
      std::copy_n(c.bias.data_ptr<float>() + d, filled, taps->row(n * (c.width + 1) + c.width));
    }
  }
};

// Strips of `rows` tokens, memory that a thread uses again.
class Strips {
 public:
  Strips(Buffer& memory, const Tile& tile, int64_t rows) : rows_(rows) {
    if (memory->rows < tile.strips * rows) memory = Buffer(tile.strips * rows, kWidth);
    data_ = memory->data;
  }
  float* at(int64_t strip, int64_t row) const { return data_ + (strip * rows_ + row) * kWidth; }
  void clear_row(const Tile& tile, int64_t row) const {
    for (int64_t n = 0; n < tile.strips; n++) Vec(0.f).store(at(n, row));
  }

 private:
  float* data_;
  int64_t rows_;
};

template <class T>
void load_row(const Tile& tile, const T* x, const Strips& out, int64_t row) {
  for (int64_t n = 0; n < tile.strips; n++)
    read(x + tile.first + n * kWidth, lanes(n * kWidth, tile.count)).store(out.at(n, row));
}
template <class T>
void store_row(const Tile& tile, const Strips& in, int64_t row, T* x) {
  for (int64_t n = 0; n < tile.strips; n++)
    write(x + tile.first + n * kWidth, Vec::loadu(in.at(n, row)), lanes(n * kWidth, tile.count));
}

// Row i of `out` = the input `from + i` of sequence n. Inputs before the first come from the state.
template <class T>
void load(const Call& c, const Tile& tile, int64_t n, int64_t from, int64_t to, const Strips& out) {
  const Tokens<T> x = c.tokens<T>(c.x, n);
  for (int64_t t = from; t < to; t++) {
    if (t >= 0) {
      load_row(tile, x.row(t), out, t - from);
      continue;
    }
    out.clear_row(tile, t - from);
    const T* state = c.earlier<T>(c.state, n, t) + tile.first * c.before();
    for (int64_t d = 0; d < tile.count; d++)
      out.at(d / kWidth, t - from)[d % kWidth] = static_cast<float>(state[d * c.before()]);
  }
}

// a_t of a strip, from the row of the oldest input. kTaps is W where it is known to the compiler, else 0.
template <int kTaps>
inline Vec convolve(const float* x, const float* taps, int64_t width) {
  const int64_t count = kTaps ? kTaps : width;
  Vec a = Vec::loadu(taps + count * kWidth);
  for (int64_t i = 0; i < count; i++)
    a = at::vec::fmadd(Vec::loadu(taps + i * kWidth), Vec::loadu(x + i * kWidth), a);
  return a;
}

// y_t of all tokens of a strip, in place of the oldest input of each.
template <int kTaps>
void forward_strip(float* x, const float* taps, int64_t width, int64_t tokens, bool activated) {
  for (int64_t t = 0; t < tokens; t++, x += kWidth) {
    const Vec a = convolve<kTaps>(x, taps, width);
    (activated ? silu(a) : a).store(x);
  }
}

// A strip of the backward pass. The rows of x are inputs; those of dy are 0 where there is no token. Both begin W − 1
// rows before the first of `tokens` tokens and end W − 1 rows behind the last one. In place of dy comes dx, and `sums`
// gets the sums of the taps and the bias over the tokens.
template <int kTaps>
void backward_strip(const float* x, float* dy, const float* taps, int64_t width, int64_t tokens, bool activated,
                    float* sums) {
  const int64_t count = kTaps ? kTaps : width, before = count - 1;
  float* da = dy + before * kWidth;
  if (activated)
    for (int64_t t = 0; t < tokens + before; t++) {
      const Vec a = convolve<kTaps>(x + t * kWidth, taps, width);
      (Vec::loadu(da + t * kWidth) * silu_slope(a, sigmoid(a))).store(da + t * kWidth);
    }
  for (int64_t i = 0; i <= count; i++) {
    Vec sum(0.f);
    for (int64_t t = 0; t < tokens; t++) {
      const Vec grad = Vec::loadu(da + t * kWidth);
      sum = i == count ? sum + grad : at::vec::fmadd(grad, Vec::loadu(x + (t + i) * kWidth), sum);
    }
    sum.store(sums + i * kWidth);
  }
  for (int64_t u = 0; u < tokens + before; u++) {  // dx_u = Σ_i w_i da_{u+W−1−i}
    Vec sum(0.f);
    for (int64_t i = 0; i < count; i++)
      sum = at::vec::fmadd(Vec::loadu(taps + i * kWidth), Vec::loadu(dy + (u + before - i) * kWidth), sum);
    sum.store(dy + u * kWidth);
  }
}

// Call f(piece, tile) for all of them.
template <class F>
void each_piece(const Call& c, F f) {
  const std::vector<Piece> pieces = make_pieces(c);
  const int64_t tasks = static_cast<int64_t>(pieces.size()) * c.tiles();
  int64_t tokens = 0;
  for (const Piece& piece : pieces) tokens += piece.stop - piece.start;
  const bool alone = tokens * c.channels < kAlone;
  at::parallel_for(0, tasks, alone ? tasks : 1, [&](int64_t from, int64_t to) {
    std::optional<Tile> tile;
    for (int64_t n = from; n < to; n++) {  // all pieces of a tile, then the next tile
      const int64_t count = static_cast<int64_t>(pieces.size());
      if (!tile || tile->first != n / count * kTile) tile.emplace(c, n / count);
      f(pieces[n % count], *tile);
    }
  });
}

// final[n][d][j] = the input L − (W − 1) + j.
template <class T>
void last_inputs(const Call& c, const Tensor& final) {
  T* all = final.data_ptr<T>();
  const int64_t each = c.channels * c.before();
  const int64_t grain = kAlone / std::max<int64_t>(1, each) + 1;
  at::parallel_for(0, c.sequences, grain, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++)
      for (int64_t j = 0; j < c.before(); j++) {
        const int64_t t = c.length(n) - c.before() + j;
        const T* in = t < 0 ? c.earlier<T>(c.state, n, t) : c.tokens<T>(c.x, n).row(t);
        const int64_t step = t < 0 ? c.before() : 1;
        T* out = all + n * each + j;
        for (int64_t d = 0; d < c.channels; d++) out[d * c.before()] = in[d * step];
      }
  });
}

template <class T>
void run(const Call& c, const Tensor& y) {
  each_piece(c, [&](const Piece& piece, const Tile& tile) {
    thread_local Buffer memory;
    const int64_t tokens = piece.stop - piece.start;
    const Strips x(memory, tile, tokens + c.before());
    load<T>(c, tile, piece.sequence, piece.start - c.before(), piece.stop, x);
    const auto strip = c.width == 4 ? forward_strip<4> : forward_strip<0>;
    for (int64_t n = 0; n < tile.strips; n++)
      strip(x.at(n, 0), tile.taps->row(n * (c.width + 1)), c.width, tokens, c.activated);
    const Tokens<T> out = c.tokens<T>(y, piece.sequence);
    for (int64_t t = 0; t < tokens; t++) store_row(tile, x, t, out.row(piece.start + t));
  });
}

struct Grads {
  Tensor dy, dfinal, dx, dstate;
  Tensor sums;  // of taps and bias, [pieces, (W + 1) · D]
};

template <class T>
void run_backward(const Call& c, const Grads& g) {
  each_piece(c, [&](const Piece& piece, const Tile& tile) {
    thread_local Buffer inputs, grads;
    const int64_t before = c.before(), n = piece.sequence, length = c.length(n), tokens = piece.stop - piece.start;
    const int64_t from = piece.start - before, seen = std::min(piece.stop + before, length);
    const int64_t rows = tokens + 2 * before;
    const Strips x(inputs, tile, rows), dy(grads, tile, rows);
    load<T>(c, tile, n, from, seen, x);
    for (int64_t t = seen; t < from + rows; t++) x.clear_row(tile, t - from);
    const Tokens<T> given = c.tokens<T>(g.dy, n), dx = c.tokens<T>(g.dx, n);
    for (int64_t t = from; t < from + rows; t++) {
      if (t >= piece.start && t < seen)
        load_row(tile, given.row(t), dy, t - from);
      else
        dy.clear_row(tile, t - from);
    }
    const auto strip = c.width == 4 ? backward_strip<4> : backward_strip<0>;
    std::vector<float> sums((c.width + 1) * kWidth);
    for (int64_t s = 0; s < tile.strips; s++) {
      strip(x.at(s, 0), dy.at(s, 0), tile.taps->row(s * (c.width + 1)), c.width, tokens, c.activated, sums.data());
      float* out = g.sums.data_ptr<float>() + piece.index * (c.width + 1) * c.channels + tile.first + s * kWidth;
      for (int64_t i = 0; i <= c.width; i++)
        std::copy_n(&sums[i * kWidth], lanes(s * kWidth, tile.count), out + i * c.channels);
    }
    for (int64_t u = piece.start == 0 ? -before : piece.start; u < piece.stop; u++) {
      const int64_t kept = u - (length - before);  // the column of the final state that is this input
      if (kept >= 0) {
        const T* passed = g.dfinal.data_ptr<T>() + (n * c.channels + tile.first) * before + kept;
        for (int64_t d = 0; d < tile.count; d++)
          dy.at(d / kWidth, u - from)[d % kWidth] += static_cast<float>(passed[d * before]);
      }
      if (u >= 0) {
        store_row(tile, dy, u - from, dx.row(u));
        continue;
      }
      T* dstate = c.earlier<T>(g.dstate, n, u) + tile.first * before;
      for (int64_t d = 0; d < tile.count; d++)
        dstate[d * before] = static_cast<T>(dy.at(d / kWidth, u - from)[d % kWidth]);
    }
  });
  for (int64_t n = 0; n < c.sequences; n++)  // an empty sequence passes its state on
    if (c.length(n) == 0) g.dstate.select(0, n).copy_(g.dfinal.select(0, n));
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, OptionalTensor bias, Tensor state,
                                   OptionalTensor cu_seqlens, bool activated) {
  const Call c = make_call(x, weight, bias, state, cu_seqlens, activated);
  Tensor y = like(x), final = at::empty(state.sizes(), x.options());
  by_type(x, [&](auto entry) {
    run<decltype(entry)>(c, y);
    last_inputs<decltype(entry)>(c, final);
  });
  return {y, final};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dy, Tensor dfinal, Tensor x, Tensor weight,
                                                    OptionalTensor bias, Tensor state, OptionalTensor cu_seqlens,
                                                    bool activated) {
  const Call c = make_call(x, weight, bias, state, cu_seqlens, activated);
  int64_t pieces = 0;
  for (int64_t n = 0; n < c.sequences; n++) pieces += blocks(c.length(n));
  const Grads g{dense_rows(dy), dfinal.contiguous(), like(x),
                at::empty(state.sizes(), x.options()),
                at::empty({pieces, (c.width + 1) * c.channels}, c.taps.options())};
  by_type(x, [&](auto entry) { run_backward<decltype(entry)>(c, g); });
  const Tensor sums = sum_of_blocks(g.sums).view({c.width + 1, c.channels});
  return {g.dx, sums.narrow(0, 0, c.width).t().to(weight.scalar_type()).contiguous(),
          bias ? sums[c.width].to(bias->scalar_type()).clone() : at::empty({0}, weight.options()),
          g.dstate.to(state.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor state, Tensor? cu_seqlens, bool activated) "
      "-> (Tensor, Tensor)",
      torch::dispatch(at::kCPU, forward));
  m.def(
      "causal_conv_backward(Tensor dy, Tensor dfinal, Tensor x, Tensor weight, Tensor? bias, Tensor state, "
      "Tensor? cu_seqlens, bool activated) -> (Tensor, Tensor, Tensor, Tensor)",
      torch::dispatch(at::kCPU, backward));
}

}  // namespace halflife
