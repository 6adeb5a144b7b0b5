// The walk of spectral Koopman attention over the blocks of all sequences and heads, forward and backward.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "koopman.h"
#include "product.h"

namespace halflife {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kBorder = 8;       // blocks from one saved state to the next
constexpr int64_t kTokenBlock = 64;  // tokens of a block where each has an operator of its own

// ------------------------------------------------------------------------------------------ tokens and states

inline void copy_row(float* out, const float* in, int64_t width) {
  if (width % kLane) {
    std::memcpy(out, in, width * sizeof(float));
    return;
  }
  for (int64_t j = 0; j < width; j += Vec::size()) Vec::loadu(in + j).store(out + j);
}

// Rows of one sequence and head of a tensor [B, T, H, D] with any strides but a dense last axis.
struct Rows {
  char* data = nullptr;
  bool half = false;  // bfloat16
  int64_t step = 0, width = 0;

  Rows() = default;
  Rows(const Tensor& x, int64_t batch, int64_t head, int64_t first = 0) {
    half = x.scalar_type() == at::kBFloat16;
    step = x.stride(1) * x.element_size();
    width = x.size(3);
    data = static_cast<char*>(x.data_ptr()) + (batch * x.stride(0) + head * x.stride(2)) * x.element_size() + first * step;
  }
  void load(float* row, int64_t token) const {
    if (half)
      at::vec::convert(reinterpret_cast<const at::BFloat16*>(data + token * step), row, width);
    else
      copy_row(row, reinterpret_cast<const float*>(data + token * step), width);
  }
  void store(const float* row, int64_t token) const {
    if (half)
      at::vec::convert(row, reinterpret_cast<at::BFloat16*>(data + token * step), width);
    else
      copy_row(reinterpret_cast<float*>(data + token * step), row, width);
  }
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

Memory make_memory(const at::TensorList& x) { return {x[0], x[1], x[2], x[3], x[4], x[5], x[6]}; }

// ------------------------------------------------------------------------------------------------- a call

struct Call {
  Tensor q, k, v;
  Memory memory;
  std::vector<int64_t> waits;   // tokens that wait, by sequence
  std::vector<int64_t> bounds;  // of packed sequences; empty for a batch of equal lengths
  std::vector<float> gamma, mix;
  double ridge;
  bool whole_sequence, tokens;  // `tokens`: every token has an operator of its own
  KoopmanSizes sizes;
  int64_t sequences, heads;

  int64_t fresh(int64_t n) const { return bounds.empty() ? q.size(1) : bounds[n + 1] - bounds[n]; }
  int64_t length(int64_t n) const { return waits[n] + fresh(n); }
  int64_t blocks(int64_t n) const { return (length(n) + sizes.block - 1) / sizes.block; }
  // The blocks that enter the sums: full ones, or all of single tokens.
  int64_t full(int64_t n) const { return tokens ? blocks(n) : length(n) / sizes.block; }
  int64_t batch(int64_t n) const { return bounds.empty() ? n : 0; }
  int64_t first_token(int64_t n) const { return bounds.empty() ? 0 : bounds[n]; }
  int64_t borders(int64_t n) const { return (blocks(n) + kBorder - 1) / kBorder; }
  int64_t count(int64_t n, int64_t block) const { return std::min(sizes.block, length(n) - block * sizes.block); }
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

std::vector<float> floats(const Tensor& x) {
  const Tensor dense = x.to(at::kFloat).contiguous();
  return {dense.data_ptr<float>(), dense.data_ptr<float>() + dense.numel()};
}

std::vector<int64_t> integers(const Tensor& x) {
  const Tensor dense = x.to(at::kLong).contiguous();
  return {dense.data_ptr<int64_t>(), dense.data_ptr<int64_t>() + dense.numel()};
}

Call make_call(const Tensor& q, const Tensor& k, const Tensor& v, at::TensorList memory, const Tensor& pending,
               const Tensor& gamma, const Tensor& mix, const OptionalTensor& cu_seqlens, double ridge, int64_t power,
               int64_t chunk_size, bool whole_sequence) {
  Call c{q, k, v, make_memory(memory), integers(pending)};
  if (cu_seqlens) c.bounds = integers(*cu_seqlens);
  c.gamma = floats(gamma);
  c.mix = floats(mix);
  c.ridge = ridge;
  c.whole_sequence = whole_sequence;
  c.tokens = chunk_size == 1;
  c.sequences = static_cast<int64_t>(c.waits.size());
  c.heads = q.size(2);
  int64_t longest = 0;
  c.sizes.block = c.tokens ? kTokenBlock : chunk_size;
  for (int64_t n = 0; n < c.sequences; n++) {
    TORCH_CHECK_VALUE(0 <= c.waits[n] && c.waits[n] <= c.memory.pending_keys.size(1),
                      "a state's count of pending tokens does not fit into its chunk");
    longest = std::max(longest, std::min(c.length(n), c.sizes.block));
  }
  c.sizes.rank = round_up(q.size(3));
  c.sizes.width = round_up(v.size(3));
  c.sizes.rows = std::max(kLane, round_up(longest));
  c.sizes.power = power;
  return c;
}

// ---------------------------------------------------------------------------------------- one sequence and head

// The blocks of a sequence and head are done in groups. Where there are fewer heads than threads, the threads share the
// blocks of a group and the rows of its sums.
class Walk {
 public:
  Walk(const Call& call, bool grads, bool alone)
      : c(call), n(call.sizes), alone(alone), sums(n.rank, n.columns()), dnext(n.rank) {
    const int64_t threads = alone ? 1 : at::get_num_threads();
    for (int64_t i = 0; i < threads; i++) workers.push_back(make_koopman_block(n, c.tokens, grads));
    group = alone && !grads ? 1 : kBorder * std::max<int64_t>(1, threads / 2);
    for (int64_t i = 0; i < group; i++) slots.emplace_back(n, grads, c.tokens);
  }

  int64_t retries() const {
    int64_t total = 0;
    for (const auto& worker : workers) total += worker->retries;
    return total;
  }

  // `borders` [·, H, R, 2 R + P] and `border_norms` [·, H] receive the sums and m² before every eighth block.
  void forward(int64_t seq, int64_t head, const Memory& final, const Tensor& y, const Tensor& borders,
               const Tensor& border_norms, int64_t first_border) {
    begin(seq, head);
    c.memory.load_sums(sums, seq, head, n.rank);
    norm = c.memory.norm_of(seq, head);
    const Rows out = c.rows(y, seq, head);
    for (int64_t start = 0; start < total; start += group) {
      const int64_t count = std::min(group, total - start);
      if (alone) fetch_ahead(start + 1, y);
      enter(start, count);
      if (borders.size(0) > 0)
        for (int64_t i = 0; i < count; i++) {
          if ((start + i) % kBorder) continue;
          const int64_t border = first_border + (start + i) / kBorder;
          copy(border_sums(borders, border), slots[i].sums);
          border_norms.data_ptr<float>()[border * c.heads + head] = slots[i].norm;
        }
      run(count, [&](KoopmanBlock& worker, int64_t i) {
        load_queries(worker.q, queries, start + i);
        if (c.tokens && group > 1) load_tokens(worker, start + i);
        worker.read(slots[i], c.count(seq, start + i));
        store_queries(worker.y, out, start + i);
      });
    }
    finish(final);
  }

  struct Grads {
    Tensor q, k, v;
    Memory memory;
    Tensor gamma, mix;  // [N, H], float64
  };

  void backward(int64_t seq, int64_t head, const Tensor& borders, const Tensor& border_norms, int64_t first_border,
                const Tensor& dy, const Memory& dfinal, const Grads& grads) {
    begin(seq, head);
    const Rows given = c.rows(dy, seq, head), dqueries = c.rows(grads.q, seq, head);
    const Stream dkeys = c.stream(grads.k, grads.memory.pending_keys, seq, head);
    const Stream dvalues = c.stream(grads.v, grads.memory.pending_values, seq, head);
    Buffer dsums(n.rank, n.columns());
    dfinal.load_sums(dsums, seq, head, n.rank);
    double dnorm = dfinal.norm_of(seq, head), dlargest = 0, dgamma = 0, dmix = 0;
    std::fill(dnext.begin(), dnext.end(), 0.f);
    std::copy_n(dfinal.last_of(seq, head), keys.call.width, dnext.begin());
    wait_back(dfinal, dkeys, dvalues);
    for (int64_t start = (total - 1) / group * group; total > 0 && start >= 0; start -= group) {
      const int64_t count = std::min(group, total - start), border = first_border + start / kBorder;
      copy(sums, border_sums(borders, border));
      norm = border_norms.data_ptr<float>()[border * c.heads + head];
      enter(start, count);
      run(count, [&](KoopmanBlock& worker, int64_t i) {
        load_queries(worker.q, queries, start + i);
        load_queries(worker.dy, given, start + i);
        if (alone) fetch_ahead(i, start, count, dy, grads);
        if (c.tokens) load_tokens(worker, start + i);
        worker.read_grad(slots[i], c.count(seq, start + i));
        store_queries(worker.dq, dqueries, start + i);
      });
      pieces([&](int64_t first, int64_t rows) {
        for (int64_t i = count - 1; i >= 0; i--) exchange(slots[i].sums, dsums, first, rows);
      });
      for (int64_t i = count - 1; i >= 0; i--) {
        KoopmanSlot& slot = slots[i];
        slot.dnorm = static_cast<float>(dnorm);
        dnorm = (slot.record() ? 0. : dnorm) + slot.dentering;
        dlargest += slot.dlargest;
        dgamma += slot.dgamma;
        dmix += slot.dmix;
      }
      const int64_t entered = std::min(count, full - start);  // blocks of the group that enter the sums
      run(entered, [&](KoopmanBlock& worker, int64_t i) {
        load_tokens(worker, start + i);
        if (c.tokens) load_queries(worker.dy, given, start + i);
        const int64_t tokens = c.count(seq, start + i), first = (start + i) * n.block;
        worker.sums_grad(slots[i], tokens);
        for (int64_t t = 0; t < tokens; t++) {
          if (t + 1 < tokens) dkeys.store_one(worker.dtokens->row(t), first + t);
          dvalues.store_one(worker.dtokens->row(t) + 2 * n.rank, first + t);
        }
        std::copy_n(worker.dtokens->row(tokens - 1), n.rank, slots[i].dlast.begin());
      });
      // The last key of a block is also the key before the next block.
      for (int64_t i = entered - 1; i >= 0; i--) {
        for (int64_t j = 0; j < n.rank; j++) slots[i].dlast[j] += dnext[j];
        dkeys.store_one(slots[i].dlast.data(), (start + i) * n.block + c.count(seq, start + i) - 1);
        dnext = slots[i].dbefore;
      }
    }
    std::copy_n(dnext.begin(), keys.call.width, grads.memory.last_of(seq, head));
    if (c.whole_sequence && largest_at < 0) dnorm += dlargest;
    if (c.whole_sequence && largest_at >= 0) add_largest(dkeys, dlargest);
    grads.memory.store_sums(dsums, seq, head, n.rank);
    grads.memory.norm_of(seq, head) = static_cast<float>(dnorm);
    grads.gamma.data_ptr<double>()[seq * c.heads + head] = dgamma;
    grads.mix.data_ptr<double>()[seq * c.heads + head] = dmix;
  }

 private:
  void begin(int64_t sequence, int64_t index) {
    seq = sequence;
    head = index;
    keys = c.keys(seq, head);
    values = c.values(seq, head);
    queries = c.rows(c.q, seq, head);
    total = c.blocks(seq);
    full = c.full(seq);
    KoopmanSettings settings = c.settings(head);
    if (c.whole_sequence) settings.largest = largest_norm();
    for (auto& worker : workers) worker->settings = settings;
  }

  // The largest squared norm in the whole sequence; `largest_at` is its token, or -1 for the state.
  float largest_norm() {
    std::vector<float> key(n.rank, 0.f);
    float largest = c.memory.norm_of(seq, head);
    largest_at = -1;
    for (int64_t t = 0; t < c.length(seq); t++) {
      keys.load_one(key.data(), t);
      const float squared = dot(key.data(), key.data(), n.rank);
      if (squared >= largest || std::isnan(squared)) largest = squared, largest_at = t;
    }
    return largest;
  }

  // The gradient of the largest norm goes to its key, whose gradient has been stored.
  void add_largest(const Stream& dkeys, double dlargest) const {
    std::vector<float> key(n.rank, 0.f), grad(n.rank, 0.f);
    keys.load_one(key.data(), largest_at);
    dkeys.load_one(grad.data(), largest_at);
    for (int64_t j = 0; j < n.rank; j++) grad[j] += static_cast<float>(2 * dlargest) * key[j];
    dkeys.store_one(grad.data(), largest_at);
  }

  // Fill the slots of `count` blocks with the sums and m² before them; `sums` and `norm` go on behind them.
  void enter(int64_t start, int64_t count) {
    run(count, [&](KoopmanBlock& worker, int64_t i) {
      KoopmanSlot& slot = slots[i];
      if (start + i >= full) {
        fill(slot.sums, 0.f);
        slot.largest = -1.f;
        return;
      }
      load_tokens(worker, start + i);
      worker.sum_tokens(slot.sums);
      worker.largest_norm(slot, c.count(seq, start + i));
    });
    pieces([&](int64_t first, int64_t rows) {
      for (int64_t i = 0; i < count; i++) exchange(slots[i].sums, sums, first, rows);
    });
    for (int64_t i = 0; i < count; i++) {
      slots[i].norm = norm;
      if (slots[i].largest > norm || std::isnan(slots[i].largest)) norm = slots[i].largest;
    }
  }

  // (slot, running) ← (running, running + slot) in some rows.
  static void exchange(const Mat& slot, const Mat& running, int64_t first, int64_t rows) {
    for (int64_t i = first; i < first + rows; i++)
      for (int64_t j = 0; j < slot.cols; j += Vec::size()) {
        const Vec own = Vec::loadu(slot.row(i) + j), before = Vec::loadu(running.row(i) + j);
        before.store(slot.row(i) + j);
        (before + own).store(running.row(i) + j);
      }
  }

  void load_tokens(KoopmanBlock& worker, int64_t block) const {
    const int64_t first = block * n.block, count = c.count(seq, block);
    const Mat all = worker.tokens, z = all.col_range(0, n.rank), before = all.col_range(n.rank, n.rank);
    keys.load(z, first, count);
    values.load(all.col_range(2 * n.rank, n.width), first, count);
    std::fill_n(before.row(0), n.rank, 0.f);
    if (first > 0)
      keys.load_one(before.row(0), first - 1);
    else
      std::copy_n(c.memory.last_of(seq, head), keys.call.width, before.row(0));
    for (int64_t i = 1; i < n.rows; i++) copy_row(before.row(i), z.row(i - 1), n.rank);
  }

  // Rows of tokens of the call; rows of waiting tokens are 0.
  void load_queries(const Mat& out, const Rows& from, int64_t block) const {
    const int64_t first = block * n.block - keys.count, count = c.count(seq, block);
    for (int64_t i = 0; i < n.rows; i++) {
      if (i < count && first + i >= 0)
        from.load(out.row(i), first + i);
      else
        std::fill_n(out.row(i), from.width, 0.f);
    }
  }
  void store_queries(const Mat& in, const Rows& to, int64_t block) const {
    const int64_t first = block * n.block - keys.count, count = c.count(seq, block);
    for (int64_t i = std::max<int64_t>(0, -first); i < count; i++) to.store(in.row(i), first + i);
  }

  // The state after the last token.
  void finish(const Memory& final) const {
    final.store_sums(sums, seq, head, n.rank);
    final.norm_of(seq, head) = norm;
    const int64_t end = std::min(full * n.block, c.length(seq));
    std::vector<float> row(std::max(n.rank, n.width));
    if (end > 0)
      keys.load_one(row.data(), end - 1);
    else
      std::copy_n(c.memory.last_of(seq, head), keys.call.width, row.data());
    std::copy_n(row.data(), keys.call.width, final.last_of(seq, head));
    for (int64_t t = end; t < c.length(seq); t++) {
      keys.load_one(row.data(), t);
      Rows(final.pending_keys, seq, head).store(row.data(), t - end);
      values.load_one(row.data(), t);
      Rows(final.pending_values, seq, head).store(row.data(), t - end);
    }
  }
  // The gradients of the tokens that still wait after the call, whose keys and values are read as part of the state only.
  void wait_back(const Memory& dfinal, const Stream& dkeys, const Stream& dvalues) const {
    const int64_t end = std::min(full * n.block, c.length(seq));
    std::vector<float> row(std::max(n.rank, n.width));
    for (int64_t t = end; t < c.length(seq); t++) {
      Rows(dfinal.pending_keys, seq, head).load(row.data(), t - end);
      dkeys.store_one(row.data(), t);
      Rows(dfinal.pending_values, seq, head).load(row.data(), t - end);
      dvalues.store_one(row.data(), t);
    }
  }

  Mat border_sums(const Tensor& borders, int64_t border) const {
    return {borders.data_ptr<float>() + (border * c.heads + head) * n.rank * n.columns(), n.rank, n.columns(), n.columns()};
  }

  // Let the worker fetch the rows of block `block`, to read or to write them.
  void add_ahead(const Tensor& x, int64_t block, bool write) {
    if (block < 0 || block >= total) return;
    const int64_t from = std::max<int64_t>(0, block * n.block - keys.count);
    const int64_t to = block * n.block + c.count(seq, block) - keys.count;
    const Rows rows = c.rows(x, seq, head);
    workers[0]->ahead.add(rows.data + from * rows.step, rows.step, rows.width * x.element_size(), to - from, write);
  }
  void fetch_ahead(int64_t block, const Tensor& y) {
    workers[0]->ahead.start(workers[0]->parts());
    for (const Tensor& x : {c.k, c.v, c.q}) add_ahead(x, block, false);
    add_ahead(y, block, true);
  }
  // In the backward pass also the keys and values of the group before this one, and the gradients of this block.
  void fetch_ahead(int64_t i, int64_t start, int64_t count, const Tensor& dy, const Grads& grads) {
    workers[0]->ahead.start(workers[0]->parts_back());
    const int64_t next = i + 1 < count ? start + i + 1 : start - group;
    for (const Tensor& x : {c.q, dy}) add_ahead(x, next, false);
    for (const Tensor& x : {c.k, c.v}) add_ahead(x, start - group + i, false);
    add_ahead(grads.q, next, true);
    for (const Tensor& x : {grads.k, grads.v}) add_ahead(x, start + i, true);
  }

  template <class F>
  void run(int64_t count, F f) {
    if (alone) {
      for (int64_t i = 0; i < count; i++) f(*workers[0], i);
      return;
    }
    at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) f(*workers[at::get_thread_num()], i);
      release(Precision::float32);
    });
  }
  template <class F>
  void pieces(F f) const {
    if (alone) return f(0, n.rank);
    at::parallel_for(0, n.rank / kLane, 1, [&](int64_t first, int64_t last) {
      f(first * kLane, (last - first) * kLane);
    });
  }

  const Call& c;
  const KoopmanSizes& n;
  bool alone;
  int64_t group, seq = 0, head = 0, total = 0, full = 0, largest_at = -1;
  Stream keys, values;
  Rows queries;
  std::vector<std::unique_ptr<KoopmanBlock>> workers;
  std::vector<KoopmanSlot> slots;
  Buffer sums;
  float norm = 0;
  std::vector<float> dnext;  // the gradient of the last key of the block in its role before the next block
};

// Run `f(walk, sequence, head)` for every sequence and head: in parallel over them, or one after the other with
// threads inside where they are too few. Returns the sum of all retries.
template <class F>
int64_t each_head(const Call& c, bool grads, F f) {
  const int64_t tasks = c.sequences * c.heads;
  std::atomic<int64_t> retries{0};
  if (tasks >= at::get_num_threads()) {
    at::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
      Walk walk(c, grads, true);
      for (int64_t i = first; i < last; i++) f(walk, i / c.heads, i % c.heads);
      retries += walk.retries();
      release(Precision::float32);
    });
  } else if (tasks > 0) {
    Walk walk(c, grads, false);
    for (int64_t i = 0; i < tasks; i++) f(walk, i / c.heads, i % c.heads);
    retries += walk.retries();
  }
  return retries;
}

// --------------------------------------------------------------------------------------------- custom ops

// y, the seven tensors of the final memory, the pending counts, sums and norms before every eighth block, and retries.
std::vector<Tensor> forward(Tensor q, Tensor k, Tensor v, at::TensorList memory, Tensor pending, Tensor gamma,
                            Tensor mix, OptionalTensor cu_seqlens, double ridge, int64_t power, int64_t chunk_size,
                            bool whole_sequence, bool save) {
  const Call c = make_call(q, k, v, memory, pending, gamma, mix, cu_seqlens, ridge, power, chunk_size, whole_sequence);
  const std::vector<int64_t> first_borders = c.first_borders();
  const int64_t count = save ? first_borders.back() : 0;
  Tensor y = at::empty(v.sizes(), v.options()), left = at::empty_like(pending);
  Tensor borders = at::empty({count, c.heads, c.sizes.rank, c.sizes.columns()}, c.memory.gram.options());
  Tensor norms = at::empty({count, c.heads}, borders.options());
  const Memory final = c.memory.like();
  const int64_t retries = each_head(c, false, [&](Walk& walk, int64_t n, int64_t head) {
    walk.forward(n, head, final, y, borders, norms, first_borders[n]);
  });
  for (int64_t n = 0; n < c.sequences; n++)
    left.data_ptr<int64_t>()[n] = c.tokens ? 0 : c.length(n) % c.sizes.block;
  std::vector<Tensor> out{y};
  for (const Tensor& x : final.tensors()) out.push_back(x);
  out.insert(out.end(), {left, borders, norms, at::full({1}, retries, left.options())});
  return out;
}

// The gradients of q, k, v, the seven tensors of the memory, γ and μ.
std::vector<Tensor> backward(Tensor q, Tensor k, Tensor v, at::TensorList memory, Tensor pending, Tensor gamma,
                             Tensor mix, OptionalTensor cu_seqlens, double ridge, int64_t power, int64_t chunk_size,
                             bool whole_sequence, Tensor borders, Tensor norms, Tensor dy, at::TensorList dfinal) {
  const Call c = make_call(q, k, v, memory, pending, gamma, mix, cu_seqlens, ridge, power, chunk_size, whole_sequence);
  const std::vector<int64_t> first_borders = c.first_borders();
  const Memory given = make_memory(dfinal);
  auto like = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
  const Tensor settings = at::empty({c.sequences, c.heads}, borders.options().dtype(at::kDouble));
  const Walk::Grads grads{like(q), like(k), like(v), c.memory.like(), settings, like(settings)};
  each_head(c, true, [&](Walk& walk, int64_t n, int64_t head) {
    walk.backward(n, head, borders, norms, first_borders[n], dy, given, grads);
  });
  std::vector<Tensor> out{grads.q, grads.k, grads.v};
  for (const Tensor& x : grads.memory.tensors()) out.push_back(x);
  out.push_back(grads.gamma.sum(0).to(at::kFloat));
  out.push_back(grads.mix.sum(0).to(at::kFloat));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(halflife, m) {
  m.def(
      "koopman(Tensor q, Tensor k, Tensor v, Tensor[] memory, Tensor pending, Tensor gamma, Tensor mix, "
      "Tensor? cu_seqlens, float ridge, int power, int chunk_size, bool whole_sequence, bool save) -> Tensor[]");
  m.def(
      "koopman_backward(Tensor q, Tensor k, Tensor v, Tensor[] memory, Tensor pending, Tensor gamma, Tensor mix, "
      "Tensor? cu_seqlens, float ridge, int power, int chunk_size, bool whole_sequence, Tensor borders, Tensor norms, "
      "Tensor dy, Tensor[] dfinal) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(halflife, CPU, m) {
  m.impl("koopman", forward);
  m.impl("koopman_backward", backward);
}

}  // namespace halflife
