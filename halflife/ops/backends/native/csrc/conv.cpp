// The short causal convolution (halflife/ops/conv.py), with its bias and SiLU:
//
//   a_t = Σ_{i<W} w_i ⊙ x_{t−W+1+i} + bias,      y_t = a_t or silu(a_t)
//
// One thread does a block of tokens of a tile of channels at a time. It copies the inputs of the block and the W − 1
// inputs before it, from the state at the start of a sequence, into a scratch matrix in float32. The backward pass
// computes a_t again from the inputs.
#include <torch/library.h>

#include <cmath>

#include "rows.h"

namespace halflife {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kTile = 128;        // channels of a tile
constexpr int64_t kUnit = 4 * kWidth;  // the columns of a tile are padded to a multiple of it

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

  template <class T>
  T* row(const Tensor& like_x, int64_t n, int64_t token) const {
    return like_x.data_ptr<T>() + batch(n) * like_x.stride(0) + (first(n) + token) * like_x.stride(1);
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
  if (cu_seqlens) {
    const Tensor bounds = cu_seqlens->to(at::kLong).contiguous();
    c.bounds.assign(bounds.data_ptr<int64_t>(), bounds.data_ptr<int64_t>() + bounds.numel());
  }
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

// A tile of channels, with its taps and bias padded by zeros.
struct Tile {
  int64_t first, count, padded;
  Buffer taps, bias;

  Tile(const Call& c, int64_t index)
      : first(index * kTile), count(std::min(kTile, c.channels - first)), padded((count + kUnit - 1) / kUnit * kUnit),
        taps(c.width, padded), bias(1, padded) {
    for (int64_t i = 0; i < c.width; i++)
      std::copy_n(c.taps.data_ptr<float>() + i * c.channels + first, count, taps->row(i));
    std::copy_n(c.bias.data_ptr<float>() + first, count, bias->row(0));
  }
};

// out[i] = the input `from + i` of sequence n. Inputs before the first come from the state.
template <class T>
void load(const Call& c, const Tile& tile, int64_t n, int64_t from, int64_t to, const Mat& out) {
  for (int64_t t = from; t < to; t++) {
    float* row = out.row(t - from);
    if (t < 0) {
      const T* state = c.earlier<T>(c.state, n, t) + tile.first * c.before();
      for (int64_t d = 0; d < tile.count; d++) row[d] = static_cast<float>(state[d * c.before()]);
    } else {
      const T* x = c.row<T>(c.x, n, t) + tile.first;
      for (int64_t d = 0; d < tile.count; d += kWidth) read(x + d, lanes(d, tile.count)).store(row + d);
    }
  }
}

// a_t for the columns from d on; `x` is the row of the oldest input.
inline Vec convolve(const Call& c, const Tile& tile, const Mat& x, int64_t row, int64_t d) {
  Vec a = Vec::loadu(tile.bias->row(0) + d);
  for (int64_t i = 0; i < c.width; i++)
    a = at::vec::fmadd(Vec::loadu(tile.taps->row(i) + d), Vec::loadu(x.row(row + i) + d), a);
  return a;
}

// Call f(piece, tile) for all of them.
template <class F>
void each_piece(const Call& c, F f) {
  const std::vector<Piece> pieces = make_pieces(c);
  at::parallel_for(0, static_cast<int64_t>(pieces.size()) * c.tiles(), 1, [&](int64_t from, int64_t to) {
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
  for (int64_t n = 0; n < c.sequences; n++)
    for (int64_t j = 0; j < c.before(); j++) {
      const int64_t t = c.length(n) - c.before() + j;
      T* out = final.data_ptr<T>() + n * c.channels * c.before() + j;
      const T* in = t < 0 ? c.earlier<T>(c.state, n, t) : c.row<T>(c.x, n, t);
      const int64_t step = t < 0 ? c.before() : 1;
      for (int64_t d = 0; d < c.channels; d++) out[d * c.before()] = in[d * step];
    }
}

template <class T>
void run(const Call& c, const Tensor& y) {
  each_piece(c, [&](const Piece& piece, const Tile& tile) {
    thread_local Buffer scratch;
    const int64_t rows = piece.stop - piece.start + c.before();
    if (scratch->rows < rows) scratch = Buffer(rows, kTile);
    const Mat x = scratch;
    load<T>(c, tile, piece.sequence, piece.start - c.before(), piece.stop, x);
    for (int64_t t = piece.start; t < piece.stop; t++) {
      T* out = c.row<T>(y, piece.sequence, t) + tile.first;
      for (int64_t d = 0; d < tile.count; d += kWidth) {
        const Vec a = convolve(c, tile, x, t - piece.start, d);
        write(out + d, c.activated ? silu(a) : a, lanes(d, tile.count));
      }
    }
  });
}

// The gradients of one piece and tile: dx, the state's if the piece is the first one, and the sums for taps and bias.
struct Grads {
  Tensor dy, dfinal, dx, dstate;
  Tensor dtaps;  // [pieces, (W + 1) · D]; the last row is the bias's
};

template <class T>
void run_backward(const Call& c, const Grads& g) {
  each_piece(c, [&](const Piece& piece, const Tile& tile) {
    thread_local Buffer inputs, grads;
    const int64_t before = c.before(), n = piece.sequence, length = c.length(n);
    const int64_t from = piece.start - before, seen = std::min(piece.stop + before, length);
    const int64_t rows = piece.stop + before - from;
    for (Buffer* b : {&inputs, &grads})
      if ((*b)->rows < rows) *b = Buffer(rows, kTile);
    const Mat x = inputs, da = grads;  // row i is token from + i
    load<T>(c, tile, n, from, seen, x);
    for (int64_t t = from; t < piece.stop + before; t++) {
      float* row = da.row(t - from);
      if (t < piece.start || t >= seen) {
        std::fill_n(row, tile.padded, 0.f);
        continue;
      }
      const T* dy = c.row<T>(g.dy, n, t) + tile.first;
      for (int64_t d = 0; d < tile.padded; d += kWidth) {
        Vec grad = d < tile.count ? read(dy + d, lanes(d, tile.count)) : Vec(0.f);
        if (c.activated) {
          const Vec a = convolve(c, tile, x, t - piece.start, d);
          grad = grad * silu_slope(a, sigmoid(a));
        }
        grad.store(row + d);
      }
    }
    // dx_u = Σ_i w_i da_{u+W−1−i}, plus what the final state passes on
    for (int64_t u = piece.start == 0 ? -before : piece.start; u < piece.stop; u++) {
      const int64_t kept = u - (length - before);  // column of the final state that holds this input
      const T* dfinal = g.dfinal.data_ptr<T>() + (n * c.channels + tile.first) * before + kept;
      for (int64_t d = 0; d < tile.count; d += kWidth) {
        Vec sum(0.f);
        for (int64_t i = 0; i <= before; i++)
          sum = at::vec::fmadd(Vec::loadu(tile.taps->row(i) + d), Vec::loadu(da.row(u - from + before - i) + d), sum);
        const int64_t count = lanes(d, tile.count);
        if (kept >= 0) {
          float passed[kWidth] = {};
          for (int64_t j = 0; j < count; j++) passed[j] = static_cast<float>(dfinal[(d + j) * before]);
          sum = sum + Vec::loadu(passed);
        }
        if (u >= 0) {
          write(c.row<T>(g.dx, n, u) + tile.first + d, sum, count);
        } else {
          float out[kWidth];
          sum.store(out);
          T* dstate = c.earlier<T>(g.dstate, n, u) + (tile.first + d) * before;
          for (int64_t j = 0; j < count; j++) dstate[j * before] = static_cast<T>(out[j]);
        }
      }
    }
    float* sums = g.dtaps.data_ptr<float>() + piece.index * (c.width + 1) * c.channels + tile.first;
    for (int64_t i = 0; i <= c.width; i++, sums += c.channels)
      for (int64_t d = 0; d < tile.count; d += kUnit) {
        Vec sum[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
        for (int64_t t = piece.start; t < piece.stop; t++)
          for (int64_t j = 0; j < 4; j++) {
            const Vec grad = Vec::loadu(da.row(t - from) + d + j * kWidth);
            if (i == c.width)
              sum[j] = sum[j] + grad;
            else
              sum[j] = at::vec::fmadd(grad, Vec::loadu(x.row(t - piece.start + i) + d + j * kWidth), sum[j]);
          }
        for (int64_t j = 0; j < 4 && d + j * kWidth < tile.count; j++)
          write(sums + d + j * kWidth, sum[j], lanes(d + j * kWidth, tile.count));
      }
  });
  for (int64_t n = 0; n < c.sequences; n++)  // an empty sequence passes its state on
    if (c.length(n) == 0) g.dstate.select(0, n).copy_(g.dfinal.select(0, n));
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, OptionalTensor bias, Tensor state,
                                   OptionalTensor cu_seqlens, bool activated) {
  const Call c = make_call(x, weight, bias, state, cu_seqlens, activated);
  Tensor y = at::empty(x.sizes(), x.options()), final = at::empty(state.sizes(), x.options());
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
  const Grads g{dense_rows(dy), dfinal.contiguous(), at::empty(x.sizes(), x.options()),
                at::empty(state.sizes(), x.options()),
                at::empty({pieces, (c.width + 1) * c.channels}, c.taps.options())};
  by_type(x, [&](auto entry) { run_backward<decltype(entry)>(c, g); });
  const Tensor sums = sum_of_blocks(g.dtaps).view({c.width + 1, c.channels});
  return {g.dx, sums.narrow(0, 0, c.width).t().to(weight.scalar_type()).contiguous(),
          bias ? sums[c.width].to(bias->scalar_type()).clone() : at::empty({0}, weight.options()),
          g.dstate.to(state.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor state, Tensor? cu_seqlens, bool activated) "
      "-> (Tensor, Tensor)");
  m.def(
      "causal_conv_backward(Tensor dy, Tensor dfinal, Tensor x, Tensor weight, Tensor? bias, Tensor state, "
      "Tensor? cu_seqlens, bool activated) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(halflife, CPU, m) {
  m.impl("causal_conv", forward);
  m.impl("causal_conv_backward", backward);
}

}  // namespace halflife
