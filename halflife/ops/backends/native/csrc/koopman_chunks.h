// The walk of mode "chunk": a block reads the sums of the blocks before it.
#pragma once
#include "koopman_walk.h"

namespace halflife::koopman {

class ChunkWalk : public Walk {
 public:
  using Walk::Walk;

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
        worker.fit(slots[i]);
        worker.read(slots[i], c.count(seq, start + i));
        store_queries(worker.y, out, start + i);
      });
    }
    finish(final);
  }

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
        worker.fit(slots[i]);
        worker.read_grad(slots[i], slots[i], c.count(seq, start + i));
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
      token_grads(start, std::min(count, full - start), given, dkeys, dvalues);
    }
    if (c.whole_sequence && largest_at < 0) dnorm += dlargest;
    if (c.whole_sequence && largest_at >= 0) add_largest(dkeys, dlargest);
    store_grads(grads, dsums, dnorm, dgamma, dmix);
  }

 private:
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
};

}  // namespace halflife::koopman
