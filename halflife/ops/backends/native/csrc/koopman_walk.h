// What the walks over the blocks of one sequence and head share.
#pragma once
#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>

#include "koopman_call.h"
#include "product.h"

namespace halflife::koopman {

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

  struct Grads {
    Tensor q, k, v;
    Memory memory;
    Tensor gamma, mix;  // [N, H], float64
  };

 protected:
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

  // The gradients of the tokens of `count` blocks, from the gradient of the sums after each in its slot.
  void token_grads(int64_t start, int64_t count, const Rows& dy, const Stream& dkeys, const Stream& dvalues) {
    run(count, [&](KoopmanBlock& worker, int64_t i) {
      load_tokens(worker, start + i);
      if (c.tokens) load_queries(worker.dy, dy, start + i);
      const int64_t tokens = c.count(seq, start + i), first = (start + i) * n.block;
      worker.sums_grad(slots[i], tokens);
      for (int64_t t = 0; t < tokens; t++) {
        if (t + 1 < tokens) dkeys.store_one(worker.dtokens->row(t), first + t);
        dvalues.store_one(worker.dtokens->row(t) + 2 * n.rank, first + t);
      }
      std::copy_n(worker.dtokens->row(tokens - 1), n.rank, slots[i].dlast.begin());
    });
    // The last key of a block is also the key before the next block.
    for (int64_t i = count - 1; i >= 0; i--) {
      for (int64_t j = 0; j < n.rank; j++) slots[i].dlast[j] += dnext[j];
      dkeys.store_one(slots[i].dlast.data(), (start + i) * n.block + c.count(seq, start + i) - 1);
      dnext = slots[i].dbefore;
    }
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
      raise_norm(slots[i]);
    }
  }

  // m² after the block of a slot.
  void raise_norm(const KoopmanSlot& slot) {
    if (slot.largest > norm || std::isnan(slot.largest)) norm = slot.largest;
  }

  // The gradients of the memory before the call, and of γ and μ.
  void store_grads(const Grads& grads, const Mat& dsums, double dnorm, double dgamma, double dmix) const {
    std::copy_n(dnext.begin(), keys.call.width, grads.memory.last_of(seq, head));
    grads.memory.store_sums(dsums, seq, head, n.rank);
    grads.memory.norm_of(seq, head) = static_cast<float>(dnorm);
    grads.gamma.data_ptr<double>()[seq * c.heads + head] = dgamma;
    grads.mix.data_ptr<double>()[seq * c.heads + head] = dmix;
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
    copy(before.row_range(1, n.rows - 1), z.row_range(0, n.rows - 1));
  }

  // Rows of tokens of the call; rows of waiting tokens are 0.
  void load_queries(const Mat& out, const Rows& from, int64_t block) const {
    const int64_t first = c.first_query(seq, block), count = c.queries(seq, block);
    for (int64_t i = 0; i < n.rows; i++) {
      if (i < count && first + i >= 0)
        from.load(out.row(i), first + i);
      else
        std::fill_n(out.row(i), from.width, 0.f);
    }
  }
  void store_queries(const Mat& in, const Rows& to, int64_t block) const {
    const int64_t first = c.first_query(seq, block), count = c.queries(seq, block);
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

  template <class F>
  void run(int64_t count, F f) {
    if (alone) {
      for (int64_t i = 0; i < count; i++) f(*workers[0], i);
      return;
    }
    at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) f(*workers[at::get_thread_num()], i);
      release(n.tokens);
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
template <class W, class F>
int64_t each_head(const Call& c, bool grads, F f) {
  const int64_t tasks = c.sequences * c.heads;
  std::atomic<int64_t> retries{0};
  if (tasks >= at::get_num_threads()) {
    at::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
      W walk(c, grads, true);
      for (int64_t i = first; i < last; i++) f(walk, i / c.heads, i % c.heads);
      retries += walk.retries();
      release(c.sizes.tokens);
    });
  } else if (tasks > 0) {
    W walk(c, grads, false);
    for (int64_t i = 0; i < tasks; i++) f(walk, i / c.heads, i % c.heads);
    retries += walk.retries();
  }
  return retries;
}

}  // namespace halflife::koopman
