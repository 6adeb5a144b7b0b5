// Spectral Koopman attention as custom ops: a walk over the blocks of all sequences and heads, forward and backward.
#include <torch/library.h>

#include "koopman_chunks.h"
#include "koopman_prefix.h"

namespace halflife {
namespace koopman {
namespace {

std::vector<float> floats(const Tensor& x) {
  const Tensor dense = x.to(at::kFloat).contiguous();
  return {dense.data_ptr<float>(), dense.data_ptr<float>() + dense.numel()};
}

// Whether bfloat16 holds every number of x, a dense tensor of float32.
bool fits_bfloat16(const Tensor& x) {
  const auto* bits = reinterpret_cast<const uint32_t*>(x.data_ptr<float>());
  return std::all_of(bits, bits + x.numel(), [](uint32_t number) { return (number & 0xffff) == 0; });
}

}  // namespace

Call make_call(const Tensor& q, const Tensor& k, const Tensor& v, at::TensorList memory, const Tensor& pending,
               const Tensor& gamma, const Tensor& mix, const OptionalTensor& cu_seqlens, double ridge, int64_t power,
               int64_t chunk_size, bool whole_sequence, bool prefix) {
  Call c{q, k, v, make_memory(memory), integers(pending)};
  if (cu_seqlens) c.bounds = integers(*cu_seqlens);
  c.gamma = floats(gamma);
  c.mix = floats(mix);
  c.ridge = ridge;
  c.whole_sequence = whole_sequence;
  c.tokens = chunk_size == 1 && !prefix;
  c.prefix = prefix;
  c.sequences = static_cast<int64_t>(c.waits.size());
  c.heads = q.size(2);
  int64_t longest = 0;
  c.sizes.block = c.tokens || prefix ? kTokenBlock : chunk_size;
  for (int64_t n = 0; n < c.sequences; n++) {
    TORCH_CHECK_VALUE(0 <= c.waits[n] && c.waits[n] <= c.memory.pending_keys.size(1),
                      "a state's count of pending tokens does not fit into its chunk");
    longest = std::max(longest, std::min(c.length(n), c.sizes.block));
  }
  if (prefix) longest = std::max(longest, std::min(q.size(1), c.sizes.block));
  c.sizes.rank = round_up(q.size(3));
  c.sizes.width = round_up(v.size(3));
  c.sizes.rows = std::max(kLane, round_up(longest));
  c.sizes.power = power;
  // Tokens in a state are float32, and were written as bfloat16 if the same call wrote them.
  const bool half = k.scalar_type() == at::kBFloat16 && v.scalar_type() == at::kBFloat16 &&
                    fits_bfloat16(c.memory.last) && fits_bfloat16(c.memory.pending_keys) &&
                    fits_bfloat16(c.memory.pending_values);
  c.sizes.tokens = half ? Precision::bfloat16 : Precision::float32;
  return c;
}

namespace {

// y, the seven tensors of the final memory, the pending counts, the sums and norms that the backward pass starts from,
// and retries. `saved` is the number of saved sums: 0 for none, −1 for as many as there are, or room for more.
std::vector<Tensor> forward(Tensor q, Tensor k, Tensor v, at::TensorList memory, Tensor pending, Tensor gamma,
                            Tensor mix, OptionalTensor cu_seqlens, double ridge, int64_t power, int64_t chunk_size,
                            bool whole_sequence, bool prefix, int64_t saved) {
  const Call c = make_call(q, k, v, memory, pending, gamma, mix, cu_seqlens, ridge, power, chunk_size, whole_sequence,
                           prefix);
  const std::vector<int64_t> first_borders = c.first_borders();
  const int64_t count = saved < 0 ? first_borders.back() : saved;
  TORCH_CHECK(count == 0 || count >= first_borders.back(), "koopman saves ", first_borders.back(), " sums, not ", count);
  Tensor y = at::empty({v.size(0), q.size(1), v.size(2), v.size(3)}, v.options()), left = at::empty_like(pending);
  Tensor borders = at::empty({count, c.heads, c.sizes.rank, c.sizes.columns()}, c.memory.gram.options());
  Tensor norms = at::empty({count, c.heads}, borders.options());
  const Memory final = c.memory.like();
  auto one = [&](auto& walk, int64_t n, int64_t head) {
    walk.forward(n, head, final, y, borders, norms, first_borders[n]);
  };
  const int64_t retries = prefix ? each_head<PrefixWalk>(c, false, one) : each_head<ChunkWalk>(c, false, one);
  for (int64_t n = 0; n < c.sequences; n++)
    left.data_ptr<int64_t>()[n] = c.tokens || prefix ? 0 : c.length(n) % c.sizes.block;
  std::vector<Tensor> out{y};
  for (const Tensor& x : final.tensors()) out.push_back(x);
  out.insert(out.end(), {left, borders, norms, at::full({1}, retries, left.options())});
  return out;
}

// The gradients of q, k, v, the seven tensors of the memory, γ and μ.
std::vector<Tensor> backward(Tensor q, Tensor k, Tensor v, at::TensorList memory, Tensor pending, Tensor gamma,
                             Tensor mix, OptionalTensor cu_seqlens, double ridge, int64_t power, int64_t chunk_size,
                             bool whole_sequence, bool prefix, Tensor borders, Tensor norms, Tensor dy,
                             at::TensorList dfinal) {
  const Call c = make_call(q, k, v, memory, pending, gamma, mix, cu_seqlens, ridge, power, chunk_size, whole_sequence,
                           prefix);
  const std::vector<int64_t> first_borders = c.first_borders();
  const Memory given = make_memory(dfinal);
  const Tensor settings = at::empty({c.sequences, c.heads}, borders.options().dtype(at::kDouble));
  const Walk::Grads grads{like(q), like(k), like(v), c.memory.like(), settings, like(settings)};
  auto one = [&](auto& walk, int64_t n, int64_t head) {
    walk.backward(n, head, borders, norms, first_borders[n], dy, given, grads);
  };
  prefix ? each_head<PrefixWalk>(c, true, one) : each_head<ChunkWalk>(c, true, one);
  std::vector<Tensor> out{grads.q, grads.k, grads.v};
  for (const Tensor& x : grads.memory.tensors()) out.push_back(x);
  out.push_back(grads.gamma.sum(0).to(at::kFloat));
  out.push_back(grads.mix.sum(0).to(at::kFloat));
  return out;
}

}  // namespace
}  // namespace koopman

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "koopman(Tensor q, Tensor k, Tensor v, Tensor[] memory, Tensor pending, Tensor gamma, Tensor mix, "
      "Tensor? cu_seqlens, float ridge, int power, int chunk_size, bool whole_sequence, bool prefix, int saved) -> Tensor[]",
      torch::dispatch(at::kCPU, koopman::forward));
  m.def(
      "koopman_backward(Tensor q, Tensor k, Tensor v, Tensor[] memory, Tensor pending, Tensor gamma, Tensor mix, "
      "Tensor? cu_seqlens, float ridge, int power, int chunk_size, bool whole_sequence, bool prefix, Tensor borders, Tensor norms, "
      "Tensor dy, Tensor[] dfinal) -> Tensor[]",
      torch::dispatch(at::kCPU, koopman::backward));
}

}  // namespace halflife
