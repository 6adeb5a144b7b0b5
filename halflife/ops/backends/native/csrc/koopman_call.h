// A call of spectral Koopman attention: its tokens, its states, and where they stand in the tensors.
#pragma once
#include <ATen/ATen.h>

#include <optional>

#include "entries.h"
#include "koopman.h"

namespace halflife::koopman {

using at::Tensor;

constexpr int64_t kBorder = 8;       // blocks from one saved state to the next
constexpr int64_t kTokenBlock = 64;  // tokens of a block where the call has no chunks

// Rows of one sequence and head of a tensor [B, T, H, D] with any strides but a dense last axis.
struct Rows {
  char* data = nullptr;
  at::ScalarType type = at::kFloat;
  int64_t step = 0, width = 0;

  Rows() = default;
  Rows(const Tensor& x, int64_t batch, int64_t head, int64_t first = 0) {
    type = x.scalar_type();
    step = x.stride(1) * x.element_size();
    width = x.size(3);
    data = static_cast<char*>(x.data_ptr()) + (batch * x.stride(0) + head * x.stride(2)) * x.element_size() + first * step;
  }
  void load(float* row, int64_t token) const { load_row(type, data + token * step, row, width); }
  void store(const float* row, int64_t token) const { store_row(type, row, data + token * step, width); }
};

// The tokens of one sequence and head: those that wait in the state, and then those of the call.
struct Stream {
  Rows waiting, call;
  int64_t count = 0;  // tokens that wait

  void load(const Mat& out, int64_t first, int64_t tokens) const {
    for (int64_t i = 0; i < out.rows; i++) {
      if (i < tokens)
        load_one(out.row(i), first + i);
      else
        std::fill_n(out.row(i), call.width, 0.f);
    }
  }
  void load_one(float* row, int64_t token) const {
    token < count ? waiting.load(row, token) : call.load(row, token - count);
  }
  void store_one(const float* row, int64_t token) const {
    token < count ? waiting.store(row, token) : call.store(row, token - count);
  }
};

// One entry [rows, cols] of a state tensor [N, H, rows, cols], which stands (transposed) in a part of the sums.
struct StatePart {
  float* data;
  int64_t rows, cols;

  StatePart(const Tensor& x, int64_t n, int64_t head)
      : data(x.data_ptr<float>() + (n * x.size(1) + head) * x.size(2) * x.size(3)), rows(x.size(2)), cols(x.size(3)) {}
  void load(const Mat& out, bool transposed = false) const {
    each_entry(out, transposed, [](float& inside, float& outside) { inside = outside; });
  }
  void store(const Mat& in, bool transposed = false) const {
    each_entry(in, transposed, [](float& inside, float& outside) { outside = inside; });
  }

 private:
  template <class F>
  void each_entry(const Mat& m, bool transposed, F f) const {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j++) f(transposed ? m.row(j)[i] : m.row(i)[j], data[i * cols + j]);
  }
};

// The tensors of a memory (halflife/ops/koopman/state.py), or their gradients.
struct Memory {
  Tensor gram, transition, values, norm, last, pending_keys, pending_values;

  void load_sums(const Mat& out, int64_t n, int64_t head, int64_t rank) const {
    StatePart(gram, n, head).load(out);
    StatePart(transition, n, head).load(out.col_range(rank, rank));
    StatePart(values, n, head).load(out.col_range(2 * rank, out.cols - 2 * rank), true);
  }
  void store_sums(const Mat& in, int64_t n, int64_t head, int64_t rank) const {
    StatePart(gram, n, head).store(in);
    StatePart(transition, n, head).store(in.col_range(rank, rank));
    StatePart(values, n, head).store(in.col_range(2 * rank, in.cols - 2 * rank), true);
  }
  float& norm_of(int64_t n, int64_t head) const { return norm.data_ptr<float>()[n * norm.size(1) + head]; }
  float* last_of(int64_t n, int64_t head) const {
    return last.data_ptr<float>() + (n * last.size(1) + head) * last.size(2);
  }
  // The same shapes, filled with zeros where a walk writes only a part.
  Memory like() const {
    return {at::empty_like(gram), at::empty_like(transition), at::empty_like(values), at::empty_like(norm),
            at::empty_like(last), at::zeros_like(pending_keys), at::zeros_like(pending_values)};
  }
  std::vector<Tensor> tensors() const { return {gram, transition, values, norm, last, pending_keys, pending_values}; }
};

inline Memory make_memory(const at::TensorList& x) { return {x[0], x[1], x[2], x[3], x[4], x[5], x[6]}; }

struct Call {
  Tensor q, k, v;
  Memory memory;
  std::vector<int64_t> waits;   // tokens that wait, by sequence
  std::vector<int64_t> bounds;  // of packed sequences; empty for a batch of equal lengths
  std::vector<float> gamma, mix;
  double ridge;
  bool whole_sequence;
  bool tokens;  // every token has an operator of its own
  bool prefix;  // one operator, of all tokens, reads all queries
  KoopmanSizes sizes;
  int64_t sequences, heads;

  int64_t fresh(int64_t n) const { return bounds.empty() ? k.size(1) : bounds[n + 1] - bounds[n]; }
  int64_t length(int64_t n) const { return waits[n] + fresh(n); }
  int64_t blocks(int64_t n) const { return (length(n) + sizes.block - 1) / sizes.block; }
  // The blocks that enter the sums: full ones, or all of them.
  int64_t full(int64_t n) const { return tokens || prefix ? blocks(n) : length(n) / sizes.block; }
  int64_t batch(int64_t n) const { return bounds.empty() ? n : 0; }
  int64_t first_token(int64_t n) const { return bounds.empty() ? 0 : bounds[n]; }
  // The sums that the backward pass starts from: before every eighth block, or after the last one.
  int64_t borders(int64_t n) const { return prefix ? 1 : (blocks(n) + kBorder - 1) / kBorder; }
  int64_t count(int64_t n, int64_t block) const { return std::min(sizes.block, length(n) - block * sizes.block); }
  // The queries of a block, which stand beside its tokens or (of a prefix) in blocks of their own.
  int64_t first_query(int64_t n, int64_t block) const { return block * sizes.block - (prefix ? 0 : waits[n]); }
  int64_t queries(int64_t n, int64_t block) const {
    return prefix ? std::min(sizes.block, q.size(1) - block * sizes.block) : count(n, block);
  }
  std::vector<int64_t> first_borders() const {
    std::vector<int64_t> first{0};
    for (int64_t n = 0; n < sequences; n++) first.push_back(first.back() + borders(n));
    return first;
  }
  KoopmanSettings settings(int64_t head) const { return {gamma[head], mix[head], ridge, whole_sequence}; }

  Stream stream(const Tensor& x, const Tensor& pending, int64_t n, int64_t head) const {
    return {waits[n] ? Rows(pending, n, head) : Rows(), Rows(x, batch(n), head, first_token(n)), waits[n]};
  }
  Stream keys(int64_t n, int64_t head) const { return stream(k, memory.pending_keys, n, head); }
  Stream values(int64_t n, int64_t head) const { return stream(v, memory.pending_values, n, head); }
  // Queries, outputs and their gradients; no row of a waiting token is read or written.
  Rows rows(const Tensor& x, int64_t n, int64_t head) const { return Rows(x, batch(n), head, first_token(n)); }
};

Call make_call(const Tensor& q, const Tensor& k, const Tensor& v, at::TensorList memory, const Tensor& pending,
               const Tensor& gamma, const Tensor& mix, const OptionalTensor& cu_seqlens, double ridge, int64_t power,
               int64_t chunk_size, bool whole_sequence, bool prefix);

}  // namespace halflife::koopman
