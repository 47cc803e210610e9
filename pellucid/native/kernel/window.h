// Convolutions in f32, as products whose left operand is read in windows.
//
// The functions that are called from a block are compiled as they stand (noipa): GCC 12, which splits a struct that is
// given by reference into parts (-fipa-sra), read other memory than that of the taps.
namespace pv {

// One axis of a window's rows or taps. Edges: a row and a tap count where 0 <= first + rows * row + taps * tap < extent.
struct WindowAxis { int64_t extent, step; };
struct Edge { int64_t first, extent, rows[3], taps[2]; };

// The left operand of a convolution as it lies: its rows are points of three axes, its terms those of two axes of taps
// and of `channels` that are neighbours. Terms count channels fastest, or, where `planes`, taps: as the right operand
// lies. `padded`: some terms lie outside; these add nothing, or, with `zeros`, zero times the right operand.
struct Window {
  const float* at;
  WindowAxis rows[3], taps[2];
  int64_t channels;
  bool planes, padded, zeros;
  Edge edges[2];
  PV_FN int64_t height() const { return rows[0].extent * rows[1].extent * rows[2].extent; }
  PV_FN int64_t area() const { return taps[0].extent * taps[1].extent; }
};

// `count` channels of one tap, from `channel` on.
struct Run {
  int64_t tap[2], channel, count;
};
PV_FN Run run_at(const Window& w, int64_t term, int64_t most) {
  const int64_t area = w.area(), tap = w.planes ? term % area : term / w.channels;
  const int64_t channel = w.planes ? term / area : term % w.channels;
  return {{tap / w.taps[1].extent, tap % w.taps[1].extent}, channel, least(w.channels - channel, most)};
}

// Calls each(row, pointer to the first term of the run, true if it counts, true if that of a tap `further` does) for all
// rows.
template <class Each>
PV_FN void for_rows(const Window& w, const Run& run, int64_t further, Each each) {
  const float* at = w.at + run.tap[0] * w.taps[0].step + run.tap[1] * w.taps[1].step + run.channel;
  const auto place = [&](const Edge& edge, int64_t i, int64_t j) PV_INLINE {
    const int64_t rows = i * edge.rows[0] + j * edge.rows[1];
    return uint64_t(edge.first + rows + run.tap[0] * edge.taps[0] + run.tap[1] * edge.taps[1]);
  };
  const Edge &above = w.edges[0], &beside = w.edges[1];
  const uint64_t down = uint64_t(further * above.taps[1]), right = uint64_t(further * beside.taps[1]);
  int64_t row = 0;
  for (int64_t i = 0; i < w.rows[0].extent; i++)
    for (int64_t j = 0; j < w.rows[1].extent; j++) {
      const float* from = at + i * w.rows[0].step + j * w.rows[1].step;
      uint64_t y = place(above, i, j), x = place(beside, i, j);
      for (int64_t k = 0; k < w.rows[2].extent; k++) {
        const bool first = y < uint64_t(above.extent) && x < uint64_t(beside.extent);
        each(row++, from, first, y + down < uint64_t(above.extent) && x + right < uint64_t(beside.extent));
        from += w.rows[2].step, y += uint64_t(above.rows[2]), x += uint64_t(beside.rows[2]);
      }
    }
}

PV_FN void copy_terms(const float* from, int64_t count, bool counts, float* to) {
  if (!counts) {
    std::memset(to, 0, size_t(count) * sizeof(float));
  } else if (count < COLUMN) {
    for (int64_t i = 0; i < count; i++) to[i] = from[i];
  } else {
    for (int64_t i = 0; i + COLUMN < count; i += COLUMN) write_column(to + i, read_column(from + i));
    write_column(to + count - COLUMN, read_column(from + count - COLUMN));
  }
}

// Rows of DEPTH terms, of which those of a run are written; zero where they do not count.
[[gnu::noinline, gnu::noipa]] inline void gather_run(const Window& w, const Run& run, float* rows) {
  for_rows(w, run, 0, [&](int64_t row, const float* from, bool counts, bool) PV_INLINE {
    copy_terms(from, run.count, counts, rows + row * DEPTH);
  });
}

// The same for all taps of the inner axis, whose channels are neighbours.
[[gnu::noinline, gnu::noipa]] inline void gather_line(const Window& w, const Run& run, float* rows) {
  const int64_t taps = w.taps[1].extent, count = taps * run.count;
  for_rows(w, run, taps - 1, [&](int64_t row, const float* from, bool first, bool last) PV_INLINE {
    float* to = rows + row * DEPTH;
    if (first && last) return copy_terms(from, count, true, to);
    const int64_t i = row / (w.rows[1].extent * w.rows[2].extent), j = row / w.rows[2].extent % w.rows[1].extent;
    const int64_t k = row % w.rows[2].extent;
    for (int64_t tap = 0; tap < taps; tap++) {
      bool counts = true;
      for (const Edge& edge : w.edges) {
        const int64_t rows_at = i * edge.rows[0] + j * edge.rows[1] + k * edge.rows[2];
        const int64_t place = edge.first + rows_at + run.tap[0] * edge.taps[0] + tap * edge.taps[1];
        counts &= uint64_t(place) < uint64_t(edge.extent);
      }
      copy_terms(from + tap * run.count, run.count, counts, to + tap * run.count);
    }
  });
}

// `depth` terms from `term` on: the channels of a tap side by side.
[[gnu::noinline, gnu::noipa]] inline void gather_rows(const Window& w, int64_t term, int64_t depth, float* rows) {
  const int64_t area = w.area(), most = w.planes ? depth / area : depth;
  for (int64_t done = 0; done < depth;) {
    const Run run = run_at(w, w.planes ? term + done / most : term + done, w.planes ? most : depth - done);
    const bool line = run.count == w.channels && run.tap[1] == 0 && w.taps[1].step == w.channels;
    const int64_t taps = line && done + w.taps[1].extent * run.count <= depth ? w.taps[1].extent : 1;
    taps > 1 ? gather_line(w, run, rows + done) : gather_run(w, run, rows + done);
    done += taps * run.count;
  }
}

// True if k rows of all panels of n columns are finite: then zeros add nothing.
[[gnu::noinline, gnu::noipa]] inline bool finite(int64_t k, int64_t n, const float* panels) {
  ColumnReg sums[4] = {};  // that do not wait for one another
  for (int64_t j = 0; j < n; j += COLUMNS, panels += COLUMN_PANEL)
    for (int64_t i = 0; i < k; i += 2) {
      const float *one = panels + i * COLUMNS, *other = panels + least(i + 1, k - 1) * COLUMNS;
      sums[0] = multiply_add(read_column(one), ColumnReg{}, sums[0]);
      sums[1] = multiply_add(read_column(one + COLUMN), ColumnReg{}, sums[1]);
      sums[2] = multiply_add(read_column(other), ColumnReg{}, sums[2]);
      sums[3] = multiply_add(read_column(other + COLUMN), ColumnReg{}, sums[3]);
    }
  return total<Sum>(Column{{(sums[0] + sums[1]) + (sums[2] + sums[3])}}) == 0;
}

// The same as `contract`, term by term: for weights that are not finite, which zeros would make NaN.
template <class Right>
[[gnu::noinline, gnu::noipa]] inline void contract_each(int64_t n, int64_t k, const Window& a, const Right& b, Sums c) {
  for (int64_t i = 0; i < a.height(); i++) std::memset(c.at + i * c.step, 0, size_t(n) * sizeof(float));
  for (int64_t t = 0; t < k; t++)
    for_rows(a, run_at(a, t, 1), 0, [&](int64_t row, const float* from, bool counts, bool) {
      for (int64_t j = 0; counts && j < n; j++)
        c.at[row * c.step + j] = __builtin_fmaf(*from, *b(t, j), c.at[row * c.step + j]);
    });
}

// Where the terms of the right operand go that lie plane by plane: taps of a channel become channels of a tap.
struct ByTap {
  int16_t at[DEPTH];
  ByTap(int64_t area, int64_t channels) {
    for (int64_t i = 0; i < area * channels; i++) at[i] = int16_t(i % area * channels + i / area);
  }
  PV_FN int64_t operator()(int64_t i) const { return at[i]; }
};

// c[M, n] = a[M, k] @ b[k, n] with windows as rows of a, at most M of them. They are copied in cache, some DEPTH terms
// at a time, so that edges, strides and dilation are nothing to the micro-kernel.
template <int M, int N, class Right>
inline void contract(int64_t n, int64_t k, const Window& a, const Right& b, float* c) {
  static_assert(N % COLUMNS == 0);
  const int64_t m = a.height(), area = a.area();
  if (k <= 0) std::memset(c, 0, size_t(m) * N * sizeof(float));
  alignas(64) float columns[is_packed<Right> ? COLUMNS : N * DEPTH];
  alignas(64) float rows[M * DEPTH];
  int64_t step = a.planes ? DEPTH / area : DEPTH;
  if (a.planes) step = (step > COLUMN ? step / COLUMN * COLUMN : step) * area;
  for (int64_t t = 0; t < k; t += step) {
    const int64_t depth = least(step, k - t);
    Panels panels;
    if constexpr (is_packed<Right>) {
      panels = {b(t, 0), b.depth, b.finite};
    } else {
      if (a.planes)
        pack_columns(b.from(t, 0), depth, n, columns, ByTap(area, depth / area));
      else
        pack_columns(b.from(t, 0), depth, n, columns);
      panels = {columns, DEPTH, !a.padded || a.zeros || finite(depth, n, columns)};
    }
    if (a.padded && !a.zeros && !panels.finite) return contract_each(n, k, a, b, {c, N, false});
    gather_rows(a, t, depth, rows);
    const Matrix<float> left{rows, DEPTH, 1};
    for (int64_t j = 0; j < n; j += COLUMNS) {
      const Rows right{panels(0, j), COLUMNS};
      for (int64_t i = 0; i < m; i += ROWS) tile_of(m - i, depth, left.from(i, 0), right, {c + i * N + j, N, t > 0});
    }
  }
}

// Taps of a window that count: their numbers, and where their elements lie, counted from the first tap's.
struct Taps {
  int count = 0;
  int16_t tap[DEPTH];
  int64_t place[DEPTH];
};

// c[P, n] = sums over taps of windows of P neighbours, `step` apart, channel by channel, with the panels of weights b.
template <int P>
[[gnu::noinline, gnu::noipa]] inline void tap_sums(int64_t n, const Taps& taps, const float* at, int64_t step, const Panels& b, Sums c) {
  int64_t j = 0;
  for (; j + COLUMNS <= n; j += COLUMNS) {
    ColumnReg sum[P][2] = {};
    for (int t = 0; t < taps.count; t++) {
      const float *x = at + taps.place[t] + j, *w = b(taps.tap[t], j);
      const ColumnReg left = read_column(w), right = read_column(w + COLUMN);
#pragma GCC unroll 12
      for (int i = 0; i < P; i++) {
        sum[i][0] = multiply_add(read_column(x + i * step), left, sum[i][0]);
        sum[i][1] = multiply_add(read_column(x + i * step + COLUMN), right, sum[i][1]);
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < P; i++) {
      write_column(c.at + i * c.step + j, sum[i][0]);
      write_column(c.at + i * c.step + j + COLUMN, sum[i][1]);
    }
  }
  for (; j < n; j++)
    for (int i = 0; i < P; i++) {
      float sum = 0;
      for (int t = 0; t < taps.count; t++)
        sum = __builtin_fmaf(at[taps.place[t] + j + i * step], *b(taps.tap[t], j), sum);
      c.at[i * c.step + j] = sum;
    }
}
template <int P = ROWS>
PV_FN void tap_sums_of(
    int64_t pixels, int64_t n, const Taps& taps, const float* at, int64_t step, const Panels& b, const Sums& c) {
  if (pixels >= P) return tap_sums<P>(n, taps, at, step, b, c);
  if constexpr (P > 1) tap_sums_of<P - 1>(pixels, n, taps, at, step, b, c);
}

// c[M, n]: column j is the sum over the k taps of column j of a's windows times b[k, j]. Inside of an image, pixels are
// neighbours with the same taps and share the reads of weights; at its edges each pixel has taps of its own.
template <int M, int N, class Right>
inline void contract_taps(int64_t n, int64_t k, const Window& a, const Right& b, float* c) {
  alignas(64) float columns[is_packed<Right> ? COLUMNS : N * DEPTH];
  Panels panels;
  if constexpr (is_packed<Right>) {
    panels = b;
  } else {
    pack_columns(b, k, n, columns);
    panels = {columns, DEPTH, !a.zeros || finite(k, n, columns)};
  }
  const bool every = a.zeros && !panels.finite;  // then zeros make NaN
  static constexpr float nothing[N] = {};
  const auto place = [&](const Edge& edge, int64_t i, int64_t j, int64_t l, int64_t t, int64_t u) PV_INLINE {
    const int64_t rows = i * edge.rows[0] + j * edge.rows[1] + l * edge.rows[2];
    return uint64_t(edge.first + rows + t * edge.taps[0] + u * edge.taps[1]) < uint64_t(edge.extent);
  };
  const auto counts = [&](int64_t i, int64_t j, int64_t l, int64_t t, int64_t u) PV_INLINE {
    return place(a.edges[0], i, j, l, t, u) && place(a.edges[1], i, j, l, t, u);
  };
  const int64_t height = a.taps[0].extent, width = a.taps[1].extent, pixels = a.rows[2].extent;
  Taps all, some;
  const auto add = [&](Taps& taps, int64_t t, int64_t u, int64_t place) PV_INLINE {
    taps.tap[taps.count] = int16_t(t * width + u);
    taps.place[taps.count++] = place;
  };
  const auto place_of = [&](int64_t t, int64_t u) PV_INLINE { return t * a.taps[0].step + u * a.taps[1].step; };
  for (int64_t t = 0; t < height; t++)
    for (int64_t u = 0; u < width; u++) add(all, t, u, place_of(t, u));
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++) {
      const float* line = a.at + i * a.rows[0].step + j * a.rows[1].step;
      const auto inside = [&](int64_t l) PV_INLINE {
        return counts(i, j, l, 0, 0) && counts(i, j, l, height - 1, width - 1);
      };
      for (int64_t l = 0; l < pixels;) {
        const Sums to{c + ((i * a.rows[1].extent + j) * pixels + l) * N, N, false};
        int64_t run = 0;
        while (run < ROWS && l + run < pixels && inside(l + run)) run++;
        if (run > 0) {
          tap_sums_of(run, n, all, line + l * a.rows[2].step, a.rows[2].step, panels, to);
        } else {
          const float* pixel = line + l * a.rows[2].step;
          some.count = 0;
          for (int64_t t = 0; t < height; t++)
            for (int64_t u = 0; u < width; u++) {
              const bool there = counts(i, j, l, t, u);
              if (there || every) add(some, t, u, there ? place_of(t, u) : nothing - pixel);
            }
          tap_sums<1>(n, some, pixel, 0, panels, to);
          run = 1;
        }
        l += run;
      }
    }
}

}  // namespace pv
