// Blocks of convolutions, and of the gradients of their weights.
namespace pv {

// The order of units in panels for a right operand that is stored plane by plane: unit `channel * area + tap` becomes
// unit `tap * channels + channel`.
struct ByTap {
  int16_t at[DEPTH];
  ByTap(int64_t area, int64_t channels) {
    for (int64_t i = 0; i < area * channels; i++) at[i] = int16_t(i % area * channels + i / area);
  }
  PV_FN int64_t operator()(int64_t i) const { return at[i]; }
};

// c[m, n] = a[m, k] @ b[k, n] with windows as rows of a, at most M of them. They are gathered to a buffer in cache,
// about DEPTH units at a time, so that edges, strides and dilation do not concern the micro-kernel. WIDTH: see `panel`.
template <int M, int N, int WIDTH, class E, class Right>
inline void contract(int64_t n, int64_t k, const Window<E>& a, const Right& b, const Sums& c) {
  static_assert(N % COLUMNS == 0);
  constexpr int T = TERMS<E>;
  const int64_t m = a.height(), area = a.area();
  if (k <= 0) clear(m, n, c);
  alignas(64) float columns[is_packed<Right> ? COLUMNS : COLUMN_PANEL];
  alignas(64) float rows[M * DEPTH];
  auto* terms = (Factor<E>*)rows;
  BlockState state;
  const bool finite_only = a.padded && !a.zeros;
  if constexpr (is_packed<Right>)
    if (finite_only && !b.finite) return contract_each(n, k, a, b, c);
  if constexpr (BY_AMX<Factor<E>>)
    if (contract_copied(n, k, a, b, c)) return;
  int64_t step = a.planes ? DEPTH / area : TERMS_AT_ONCE<E>;
  if (a.planes) step = (step > COLUMN ? step / COLUMN * COLUMN : step) * area;
  for (int64_t t = 0; t < k; t += step) {
    const int64_t depth = least(step, k - t), units = units_of<E>(depth);
    gather_rows(a, t, depth, terms);
    const LeftRows left = Matrix<Factor<E>>{terms, TERMS_AT_ONCE<E>, 1};
    const Sums sums = c.after(t, depth, k);
    const ByTap by_tap(area, a.planes ? depth / area : 0);
    for (int64_t j = 0; j < n; j += COLUMNS) {
      const float* at = columns;
      if constexpr (is_packed<Right>) {
        at = b(t / T, j);
        state.prefetcher = prefetcher_for<Factor<E>>(b, t / T, units, units_of<E>(k), j, n, m);
      } else {
        const int64_t some = least(COLUMNS, n - j);
        if (a.planes) pack_columns(b.from(t, j), depth, some, columns, COLUMN_PANEL, by_tap);
        else pack_columns(b.from(t, j), depth, some, columns);
        if (finite_only && !finite<Factor<E>>(units, some, columns)) return contract_each(n, k, a, b, c);
        state.prefetcher = prefetcher_for<in_one_block<N, WIDTH>>(b, t, depth, k, j, n, m);
      }
      const Rows right{at, COLUMNS};  // as a temporary it causes an internal error of GCC 12
      panel<WIDTH>(state, m, n - j, units, left, right, sums.from(0, j));
    }
  }
}

// Terms that are pixels: axes of images, lines and columns, with their steps in both operands. The edges determine
// which pixels are in bounds for a tap.
struct TermAxis { int64_t extent, left, right; };
struct Pixels {
  TermAxis axes[3];
  Edge edges[2];
};

// A matrix whose row i is contiguous at offset[i]; and its transpose.
struct OffsetRows {
  using Element = float;
  static constexpr int64_t row = 0, column = 1;
  const float* at;
  const int64_t* offset;
  PV_FN const float* operator()(int64_t i, int64_t j) const { return at + offset[i] + j; }
  PV_FN OffsetRows from(int64_t i, int64_t j) const { return {at + j, offset + i}; }
};
struct OffsetColumns {
  using Element = float;
  static constexpr int64_t row = 1, column = 0;
  OffsetRows rows;
  PV_FN const float* operator()(int64_t i, int64_t j) const { return rows(j, i); }
};

// c[m, n] = sum over pixels of left[pixel, m] * right[pixel, n], or times zero if a pixel is out of bounds: that
// matters if left is not finite. It is the gradient of a weight for one tap. WIDTH: see `panel`.
template <int M, int N, int WIDTH>
inline void contract_pixels(
    int64_t m, int64_t n, const float* left, const float* right, const Pixels& pixels, const Sums& c) {
  static_assert(N % COLUMNS == 0);
  alignas(64) float columns[N * DEPTH];
  alignas(64) float rows[(M + ROWS - 1) / ROWS * ROW_PANEL];
  // Prefetching reads offsets past `count`.
  int64_t lefts[DEPTH + PREFETCH_UNITS] = {}, rights[DEPTH + PREFETCH_UNITS] = {};
  static constexpr float zero_row[N] = {};
  BlockState state;
  int count = 0;
  bool more = false;
  const auto add = [&](bool last) {
    pack_rows(OffsetColumns{{left, lefts}}, m, count, rows);
    pack_columns(OffsetRows{right, rights}, count, n, columns);
    const Sums sums{c.at, c.step, more, c.past && last};
    const LeftRows left_rows{Matrix<float>{rows, 1, ROWS}, ROW_PANEL};
    for (int64_t j = 0; j < n; j += COLUMNS)
      panel<WIDTH>(state, m, n - j, count, left_rows, Rows{columns + j * DEPTH, COLUMNS}, sums.from(0, j));
    more = true, count = 0;
  };
  const auto& [images, lines, line] = pixels.axes;
  for (int64_t i = 0; i < images.extent; i++)
    for (int64_t j = 0; j < lines.extent; j++)
      for (int64_t k = 0; k < line.extent; k++) {
        const int64_t one = i * images.left + j * lines.left + k * line.left;
        const int64_t other = i * images.right + j * lines.right + k * line.right;
        const bool in_bounds = is_in_bounds(pixels.edges, i, j, k);
        if (!in_bounds && all_finite(left + one, m)) continue;
        if (count == DEPTH) add(false);
        lefts[count] = one;
        rights[count++] = in_bounds ? other : zero_row - right;
      }
  add(true);
}

// The taps of a window, and steps in the right operand: `pixel` units from a pixel to the next, `right` units from a
// tap of a line to the next, `down` elements from a line of taps to the next. A unit is `unit` elements.
struct Taps { int64_t height, width, down, right, pixel, unit; };

// Whether line j of pixels is in bounds for the taps of line `down`.
PV_FN bool line_in_bounds(const Pixels& pixels, int64_t j, int64_t down) {
  bool all = true;
  for (const Edge& edge : pixels.edges)
    if (edge.rows[2] == 0 && edge.taps[1] == 0)
      all &= uint64_t(edge.first + j * edge.rows[1] + down * edge.taps[0]) < uint64_t(edge.extent);
  return all;
}

// Which of `all` positions in a line of the image, a `parts`-th of a pixel's step apart, are in bounds. The first one
// is that of tap `right` at pixel k. Edges that depend on lines only are ignored.
PV_FN Span span_in_line(const Pixels& pixels, int64_t k, int64_t right, int64_t parts, int64_t all) {
  Span span{0, all};
  for (const Edge& edge : pixels.edges)
    if (edge.rows[2] != 0 || edge.taps[1] != 0) {
      const int64_t first = edge.first + k * edge.rows[2] + right * edge.taps[1];
      span.intersect(span_in_bounds(edge.extent, first, edge.rows[2] / parts, all));
    }
  return span;
}

// Pack `span` rows of the right operand as panels, with zeros for those that are not in `in_bounds`. panel: floats from
// one panel to the next.
inline void pack_units(
    const Matrix<float>& b, const Span& in_bounds, int64_t span, int64_t n, float* panels, int64_t panel) {
  const int64_t some = in_bounds.last > in_bounds.first ? in_bounds.last - in_bounds.first : 0;
  const int64_t first = some > 0 ? in_bounds.first : 0, last = first + some;
  for (float* to = panels; to < panels + panels_of(n) / COLUMNS * panel; to += panel) {
    std::memset(to, 0, size_t(first * COLUMNS) * sizeof(float));
    std::memset(to + last * COLUMNS, 0, size_t((span - last) * COLUMNS) * sizeof(float));
  }
  if (some > 0) pack_columns(b.from(first, 0), some, n, panels + first * COLUMNS, panel);
}

// Rows of the right operand in lines of `line` rows, with a gap after each line. left: rows left of the current line.
struct RowsOfLines {
  const float* at;
  int64_t step, line, gap, left;
  PV_FN ColumnReg read(int j) const { return read_column(at + j); }
  PV_FN void next() {
    at += step;
    if (--left == 0) at += gap, left = line;
  }
};

// The sums of `contract_pixels` for all taps of a window, which share packed operands: c[m, taps, n]. Several lines of
// pixels, or a piece of a line, are processed at a time. For each such line, the units of the image that a line of taps
// reaches are packed, with zeros out of bounds; each of its taps begins at another of these units.
template <int M, int N, int WIDTH>
inline void contract_taps(int64_t m, int64_t n, const float* left, const float* right, const Pixels& pixels,
                          const Taps& taps, const Sums& c) {
  static_assert(N % COLUMNS == 0);
  constexpr int64_t ROOM = 2 * DEPTH;  // units of a panel
  alignas(64) float columns[N * ROOM];
  alignas(64) float rows[(M + ROWS - 1) / ROWS * ROW_PANEL];
  const auto& [images, lines, line] = pixels.axes;
  if (images.extent * lines.extent * line.extent == 0) return clear(m * taps.height * taps.width, n, c);
  const int64_t halo = (taps.width - 1) * taps.right + 1;
  const int64_t piece = equal_part(line.extent, least(DEPTH, (ROOM - halo) / taps.pixel + 1));
  const int64_t most = piece < line.extent ? 1 : least(DEPTH / piece, ROOM / ((piece - 1) * taps.pixel + halo));
  const LeftRows left_rows{Matrix<float>{rows, 1, ROWS}, ROW_PANEL};
  BlockState state;
  // Add the products of `high` lines of `wide` pixels, from pixel k of line j of image i on.
  const auto add = [&](int64_t i, int64_t j, int64_t k, int64_t high, int64_t wide, bool more, bool past) PV_INLINE {
    const float* pixel = left + i * images.left + j * lines.left + k * line.left;
    for (int64_t l = 0; l < high; l++)
      pack_rows(Matrix<float>{pixel + l * lines.left, 1, line.left}, m, wide, rows + l * wide * ROWS);
    const int64_t span = (wide - 1) * taps.pixel + halo;
    const Span in_bounds = span_in_line(pixels, k, 0, taps.pixel, span);
    for (int64_t t = 0; t < taps.height; t++) {
      const float* image = right + i * images.right + j * lines.right + k * line.right + t * taps.down;
      for (int64_t l = 0; l < high; l++)
        pack_units(Matrix<float>{image + l * lines.right, taps.unit, 1},
                   line_in_bounds(pixels, j + l, t) ? in_bounds : Span{}, span, n, columns + l * span * COLUMNS,
                   ROOM * COLUMNS);
      for (int64_t first = 0; first < n; first += COLUMNS)
        for (int64_t u = 0; u < taps.width; u++) {
          const float* at = columns + first * ROOM + u * taps.right * COLUMNS;
          const int64_t step = taps.pixel * COLUMNS, tap = t * taps.width + u;
          const Sums sums{c.at + tap * c.step + first, taps.height * taps.width * c.step, more, past};
          panel<WIDTH>(state, m, n - first, high * wide, left_rows,
                       RowsOfLines{at, step, wide, span * COLUMNS - wide * step, wide}, sums);
        }
    }
  };
  bool more = false;
  for (int64_t i = 0; i < images.extent; i++)
    for (int64_t j = 0; j < lines.extent; j += most)
      for (int64_t k = 0; k < line.extent; k += piece) {
        const bool last = i + 1 == images.extent && j + most >= lines.extent && k + piece >= line.extent;
        add(i, j, k, least(most, lines.extent - j), least(piece, line.extent - k), more, c.past && last);
        more = true;
      }
}

// Pack b[k, n] as panels of f32, whatever its type: taps are multiplied one by one. channels: of a tap, if the terms of
// b are stored channel by channel, else 1.
template <class E> PV_FN void pack_taps(const Matrix<E>& b, int64_t k, int64_t n, int64_t channels, float* panels) {
  if constexpr (std::is_same_v<E, float>) {
    if (channels > 1) return pack_columns(b, k, n, panels, COLUMN_PANEL, ByTap(k / channels, channels));
    return pack_columns(b, k, n, panels);
  } else {
    pack_elements<float>(b, 0, k, n, panels, COLUMN_PANEL, InOrder());
  }
}

}  // namespace pv
