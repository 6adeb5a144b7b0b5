// The walk of modes "prefix" and "masked": one operator, of all tokens, reads all queries.
#pragma once
#include "koopman_walk.h"

namespace halflife::koopman {

class PrefixWalk : public Walk {
 public:
  PrefixWalk(const Call& call, bool grads, bool alone) : Walk(call, grads, alone), operators(n, false, false) {}

  // `after` [N, H, R, 2 R + P] and `norms` [N, H] receive the sums and m² of all tokens.
  void forward(int64_t seq, int64_t head, const Memory& final, const Tensor& y, const Tensor& after,
               const Tensor& norms, int64_t border) {
    begin(seq, head);
    c.memory.load_sums(sums, seq, head, n.rank);
    norm = c.memory.norm_of(seq, head);
    for (int64_t start = 0; start < total; start += group) enter(start, std::min(group, total - start));
    if (after.size(0) > 0) {
      copy(border_sums(after, border), sums);
      norms.data_ptr<float>()[border * c.heads + head] = norm;
    }
    fit(sums, norm);
    const Rows out = c.rows(y, seq, head);
    each_query_group([&](int64_t start, int64_t count) {
      run(count, [&](KoopmanBlock& worker, int64_t i) {
        load_queries(worker.q, queries, start + i);
        worker.read(operators, c.queries(seq, start + i));
        store_queries(worker.y, out, start + i);
      });
    });
    finish(final);
  }

  void backward(int64_t seq, int64_t head, const Tensor& after, const Tensor& norms, int64_t border, const Tensor& dy,
                const Memory& dfinal, const Grads& grads) {
    begin(seq, head);
    fit(border_sums(after, border), norms.data_ptr<float>()[border * c.heads + head]);
    Buffer dsums(n.rank, n.columns());
    dfinal.load_sums(dsums, seq, head, n.rank);
    double dnorm = dfinal.norm_of(seq, head), dgamma = 0, dmix = 0;
    const Rows given = c.rows(dy, seq, head), dqueries = c.rows(grads.q, seq, head);
    each_query_group([&](int64_t start, int64_t count) {
      run(count, [&](KoopmanBlock& worker, int64_t i) {
        load_queries(worker.q, queries, start + i);
        load_queries(worker.dy, given, start + i);
        worker.read_grad(slots[i], operators, c.queries(seq, start + i));
        store_queries(worker.dq, dqueries, start + i);
      });
      pieces([&](int64_t first, int64_t rows) {
        for (int64_t i = 0; i < count; i++) add(dsums->row_range(first, rows), slots[i].sums->row_range(first, rows));
      });
      for (int64_t i = 0; i < count; i++) {
        dnorm += slots[i].dentering;
        dgamma += slots[i].dgamma;
        dmix += slots[i].dmix;
      }
    });
    const Stream dkeys = c.stream(grads.k, grads.memory.pending_keys, seq, head);
    const Stream dvalues = c.stream(grads.v, grads.memory.pending_values, seq, head);
    std::fill(dnext.begin(), dnext.end(), 0.f);
    std::copy_n(dfinal.last_of(seq, head), keys.call.width, dnext.begin());
    const std::vector<Norms> before = walk_norms();
    for (int64_t start = (total - 1) / group * group; total > 0 && start >= 0; start -= group) {
      const int64_t count = std::min(group, total - start);
      for (int64_t i = count - 1; i >= 0; i--) {
        KoopmanSlot& slot = slots[i];
        std::tie(slot.norm, slot.largest, slot.row) = before[start + i];
        slot.dnorm = static_cast<float>(dnorm);
        if (slot.record()) dnorm = 0;
        copy(slot.sums, dsums);
      }
      token_grads(start, count, given, dkeys, dvalues);
    }
    store_grads(grads, dsums, dnorm, dgamma, dmix);
  }

 private:
  using Norms = std::tuple<float, float, int64_t>;  // of a slot: m² before the block, and the largest norm with its row

  void fit(const Mat& all, float m2) {
    copy(operators.sums, all);
    operators.norm = m2;
    for (auto& worker : workers) worker->fit(operators);
  }

  template <class F>
  void each_query_group(F f) const {
    const int64_t blocks = (c.q.size(1) + n.block - 1) / n.block;
    for (int64_t start = 0; start < blocks; start += group) f(start, std::min(group, blocks - start));
  }

  std::vector<Norms> walk_norms() {
    std::vector<Norms> all;
    norm = c.memory.norm_of(seq, head);
    for (int64_t start = 0; start < total; start += group) {
      const int64_t count = std::min(group, total - start);
      run(count, [&](KoopmanBlock& worker, int64_t i) {
        load_tokens(worker, start + i);
        worker.largest_norm(slots[i], c.count(seq, start + i));
      });
      for (int64_t i = 0; i < count; i++) {
        all.emplace_back(norm, slots[i].largest, slots[i].row);
        raise_norm(slots[i]);
      }
    }
    return all;
  }

  KoopmanSlot operators;  // the sums and m² that all queries read
};

}  // namespace halflife::koopman
