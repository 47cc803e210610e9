// Convolutions, as products whose left operand is read in windows.
//
// The functions that a block calls are noipa: GCC 12, which splits a struct that is passed by reference into scalars
// (-fipa-sra), read other memory than that of the taps.
namespace pv {

// One axis of a window's rows or taps; and a bound of the image: a row and a tap are in bounds if, for both edges,
// 0 <= first + rows * row + taps * tap < extent.
struct WindowAxis { int64_t extent, step; };
struct Edge { int64_t first, extent, rows[3], taps[2]; };

// Whether tap (t, u) of row (i, j, k) is in bounds.
PV_FN bool is_in_bounds(const Edge (&edges)[2], int64_t i, int64_t j, int64_t k, int64_t t = 0, int64_t u = 0) {
  bool all = true;
  for (const Edge& edge : edges) {
    const int64_t rows = i * edge.rows[0] + j * edge.rows[1] + k * edge.rows[2];
    all &= uint64_t(edge.first + rows + t * edge.taps[0] + u * edge.taps[1]) < uint64_t(edge.extent);
  }
  return all;
}

// The left operand of a convolution in memory: its rows are the points of three axes, its terms those of two axes of
// taps and of channels. channel_step: elements from a channel to the next; only `contract_spread` supports others than
// 1. planes: terms are ordered like the rows of a right operand that is stored plane by plane, taps innermost (only
// f32); else channels are innermost. padded: some terms are out of bounds; these add nothing, or, with `zeros`, zero
// times the right operand.
template <class E> struct Window {
  const E* at;
  WindowAxis rows[3], taps[2];
  int64_t channels, channel_step;
  bool planes, padded, zeros;
  Edge edges[2];
  PV_FN int64_t height() const { return rows[0].extent * rows[1].extent * rows[2].extent; }
  PV_FN int64_t area() const { return taps[0].extent * taps[1].extent; }
};

// Channels [channel, channel + count) of one tap.
struct Run {
  int64_t tap[2], channel, count;
};
template <class E> PV_FN Run run_at(const Window<E>& w, int64_t term, int64_t most) {
  const int64_t area = w.area(), tap = w.planes ? term % area : term / w.channels;
  const int64_t channel = w.planes ? term / area : term % w.channels;
  return {{tap / w.taps[1].extent, tap % w.taps[1].extent}, channel, least(w.channels - channel, most)};
}

// Calls each(row, pointer to the first term of the run, whether it is in bounds, whether the same term `further` taps
// later is) for all rows.
template <class E, class Each>
PV_FN void for_rows(const Window<E>& w, const Run& run, int64_t further, Each each) {
  const E* at = w.at + run.tap[0] * w.taps[0].step + run.tap[1] * w.taps[1].step + run.channel;
  const auto coordinate = [&](const Edge& edge, int64_t i, int64_t j) PV_INLINE {
    const int64_t rows = i * edge.rows[0] + j * edge.rows[1];
    return uint64_t(edge.first + rows + run.tap[0] * edge.taps[0] + run.tap[1] * edge.taps[1]);
  };
  const Edge &vertical = w.edges[0], &horizontal = w.edges[1];
  const uint64_t down = uint64_t(further * vertical.taps[1]), right = uint64_t(further * horizontal.taps[1]);
  int64_t row = 0;
  for (int64_t i = 0; i < w.rows[0].extent; i++)
    for (int64_t j = 0; j < w.rows[1].extent; j++) {
      const E* from = at + i * w.rows[0].step + j * w.rows[1].step;
      uint64_t y = coordinate(vertical, i, j), x = coordinate(horizontal, i, j);
      for (int64_t k = 0; k < w.rows[2].extent; k++) {
        const bool first = y < uint64_t(vertical.extent) && x < uint64_t(horizontal.extent);
        const bool last = y + down < uint64_t(vertical.extent) && x + right < uint64_t(horizontal.extent);
        each(row++, from, first, last);
        from += w.rows[2].step, y += uint64_t(vertical.rows[2]), x += uint64_t(horizontal.rows[2]);
      }
    }
}

// Copy a register of terms, or n of them, as factors.
template <class E, class N> PV_FN void copy_register(const E* from, Factor<E>* to, const N& n) {
  if constexpr (TERMS<E> == 1) store<float>(to, load(from, n), n);
  else store<uint16_t>((uint16_t*)to, load((const uint16_t*)from, n), n);
}
// Copy `count` terms as factors, or store zeros if they are out of bounds.
template <class E> PV_FN void copy_terms(const E* from, int64_t count, bool in_bounds, Factor<E>* to) {
  constexpr int W = COLUMN * TERMS<E>;
  if (!in_bounds) {
    std::memset(to, 0, size_t(count) * sizeof(Factor<E>));
  } else if (count < W) {
    copy_register(from, to, Some<W>(count));
  } else {
    for (int64_t i = 0; i + W < count; i += W) copy_register(from + i, to + i, All<W>());
    copy_register(from + count - W, to + count - W, All<W>());
  }
}

// Write the terms of a run to rows of TERMS_AT_ONCE terms; zero if out of bounds.
template <class E>
[[gnu::noinline, gnu::noipa]] inline void gather_run(const Window<E>& w, const Run& run, Factor<E>* rows) {
  for_rows(w, run, 0, [&](int64_t row, const E* from, bool in_bounds, bool) PV_INLINE {
    copy_terms(from, run.count, in_bounds, rows + row * TERMS_AT_ONCE<E>);
  });
}

// `gather_run` for all taps of the inner axis, if their channels are contiguous.
template <class E>
[[gnu::noinline, gnu::noipa]] inline void gather_line(const Window<E>& w, const Run& run, Factor<E>* rows) {
  const int64_t taps = w.taps[1].extent, count = taps * run.count;
  for_rows(w, run, taps - 1, [&](int64_t row, const E* from, bool first, bool last) PV_INLINE {
    Factor<E>* to = rows + row * TERMS_AT_ONCE<E>;
    if (first && last) return copy_terms(from, count, true, to);
    const int64_t i = row / (w.rows[1].extent * w.rows[2].extent), j = row / w.rows[2].extent % w.rows[1].extent;
    const int64_t k = row % w.rows[2].extent;
    for (int64_t tap = 0; tap < taps; tap++) {
      const bool in_bounds = is_in_bounds(w.edges, i, j, k, run.tap[0], tap);
      copy_terms(from + tap * run.count, run.count, in_bounds, to + tap * run.count);
    }
  });
}

// Write `depth` terms from `term` on to rows: the channels of a tap are contiguous, and the missing second term of a
// last unit is zero.
template <class E>
PV_SHARED void gather_rows(const Window<E>& w, int64_t term, int64_t depth, Factor<E>* rows) {
  const int64_t area = w.area(), most = w.planes ? depth / area : depth;
  for (int64_t done = 0; done < depth;) {
    const Run run = run_at(w, w.planes ? term + done / most : term + done, w.planes ? most : depth - done);
    const bool line = run.count == w.channels && run.tap[1] == 0 && w.taps[1].step == w.channels;
    const int64_t taps = line && done + w.taps[1].extent * run.count <= depth ? w.taps[1].extent : 1;
    taps > 1 ? gather_line(w, run, rows + done) : gather_run(w, run, rows + done);
    done += taps * run.count;
  }
  if (depth % TERMS<E> == 0) return;
  for (int64_t row = 0; row < w.height(); row++) rows[row * TERMS_AT_ONCE<E> + depth] = Factor<E>{};
}

// Whether n units are finite. F: the type of their terms; if that is not float, n is a multiple of COLUMN.
template <class F = float> PV_FN bool all_finite(const float* p, int64_t n) {
  ColumnReg sums[4] = {};  // independent, to hide the latency
  int64_t i = 0;
  const auto add = [&](int k) PV_INLINE {
    sums[k] = multiply_units<F>(read_column(p + i + k * COLUMN), ColumnReg{}, sums[k]);
  };
  for (; i + 4 * COLUMN <= n; i += 4 * COLUMN)
    for (int k = 0; k < 4; k++) add(k);
  for (; i + COLUMN <= n; i += COLUMN) add(0);
  bool all = total<Sum>(Column{{(sums[0] + sums[1]) + (sums[2] + sums[3])}}) == 0;
  for (; i < n; i++) all &= __builtin_isfinite(p[i]);
  return all;
}
// Whether k units of all panels of n columns are finite: then multiplying them by zeros adds nothing.
template <class F>
PV_SHARED bool finite(int64_t k, int64_t n, const float* panels) {
  bool all = true;
  for (int64_t j = 0; all && j < n; j += COLUMNS, panels += COLUMN_PANEL) all = all_finite<F>(panels, k * COLUMNS);
  return all;
}

// Like `contract`, term by term and only those in bounds: for weights that are not finite, which times zero would be
// NaN.
template <class E, class Right>
PV_SHARED void contract_each(int64_t n, int64_t k, const Window<E>& a, const Right& b, Sums c) {
  constexpr int T = TERMS<E>;
  const auto weight = [&](int64_t t, int64_t j) PV_INLINE {
    if constexpr (is_packed<Right>) return load((const Factor<E>*)b(t / T, j) + t % T);
    else return load(b(t, j));
  };
  clear(a.height(), n, c);
  for (int64_t t = 0; t < k; t++)
    for_rows(a, run_at(a, t, 1), 0, [&](int64_t row, const E* from, bool in_bounds, bool) {
      for (int64_t j = 0; in_bounds && j < n; j++)
        c.at[row * c.step + j] = __builtin_fmaf(load(from), weight(t, j), c.at[row * c.step + j]);
    });
}

// The pixels [first, last) of a line.
struct Span {
  int64_t first, last;
  PV_FN bool contains(int64_t i) const { return i >= first && i < last; }
  PV_FN void intersect(Span other) {
    if (other.first > first) first = other.first;
    if (other.last < last) last = other.last;
  }
};

// Which of the `all` positions first, first + step, ... are in [0, extent).
PV_FN Span span_in_bounds(int64_t extent, int64_t first, int64_t step, int64_t all) {
  if (step == 0) return {0, uint64_t(first) < uint64_t(extent) ? all : 0};
  const auto from = [&](int64_t bound) PV_INLINE {  // the index of the first position at or past it
    const int64_t missing = bound - first;
    return missing <= 0 ? 0 : step == 1 ? missing : (missing + step - 1) / step;
  };
  return {from(0), from(extent)};
}

}  // namespace pv
