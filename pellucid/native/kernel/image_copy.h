// Convolutions in bf16 by AMX tiles, whose windows overlap in memory.
//
// The part of the images that a block reads is copied once, with zeros out of bounds. A row of a tile is read from the
// copy at a pixel, and the next row at the next pixel: another tap of the window is another offset in the same copy,
// and no windows are gathered. Tiles are equal pieces of the lines of the result.
//
// If the channels fill tiles, the copy has planes, each with as many channels as a tile has terms: a pixel of a plane
// is one cache line, and pixels with the same remainder modulo the stride are adjacent. Else it has the lines of the
// image unchanged: a row of a tile begins with all taps of a line of the window, and what it reads after these is
// multiplied by zero.
namespace pv {

#ifdef PV_AMX

constexpr int64_t PLANE = AMX_TILE * TERMS<bf16>;  // terms of a row of a tile
constexpr int64_t MAX_COPY_BYTES = 1 << 19;  // bytes, on the stack
// Number of tiles of terms per pass over the sums: many, so that sums are rarely stored and reloaded; few, which stay
// in the L1 cache, if the lines of the result are short and most of the reads are of the right operand.
constexpr int64_t MANY_STEPS = 36, FEW_STEPS = 12, SHORT_LINE = 8;
constexpr int64_t MIN_LINE = 6;  // with shorter ones, tiles would have too few rows

// One axis of images. Tap t of row r reads position stride * r + dilation * t. step: elements from a position to the
// next. In the copy that is pixel r + shift(t) of part t % stride; each part has space for `length` pixels.
struct CopyAxis {
  int64_t step, stride, dilation, rows, taps, parts, first, length;  // first: the minimum of `quotient`
  PV_FN int64_t remainder(int64_t t) const { return (dilation * t % stride + stride) % stride; }
  PV_FN int64_t quotient(int64_t t) const { return (dilation * t - remainder(t)) / stride; }
  PV_FN int64_t shift(int64_t t) const { return quotient(t) - first; }
  PV_FN int64_t position(int64_t part, int64_t i) const { return stride * (i + first) + remainder(part); }
  // The pixels of a part that some row and tap read: only those exist in memory.
  PV_FN Span pixels_read(int64_t part) const {
    const int64_t one = shift(part), other = shift(part + (taps - 1 - part) / stride * stride);
    return {least(one, other), rows + one + other - least(one, other)};
  }
};
// The axis of rows and taps; its `length` is 0 if these have no common step.
inline CopyAxis copy_axis(const WindowAxis& rows, const WindowAxis& taps) {
  if (taps.extent == 1) return {rows.step, 1, 0, rows.extent, 1, 1, 0, rows.extent};
  int64_t step = taps.step < 0 ? -taps.step : taps.step, stride = 1;
  if (rows.extent > 1) {
    step = rows.step;
    for (int64_t rest = taps.step; rest != 0;) step = std::exchange(rest, step % rest);
    if ((rows.step < 0) != (step < 0)) step = -step;
    stride = step ? rows.step / step : 0;
  }
  if (stride == 0 || step == 0) return {};
  CopyAxis axis{step, stride, taps.step / step, rows.extent, taps.extent, least(stride, taps.extent), 0, 0};
  const int64_t last = axis.quotient(taps.extent - 1);
  axis.first = least(0, last);
  axis.length = rows.extent + last - 2 * axis.first;
  return axis;
}

// An edge of the image, see `Edge`. image, line, column: by how much the coordinate of a position increases per image,
// line and column of positions.
struct CopyEdge { int64_t first, extent, image, line, column; };

// The layout of the copy: [plane][image][line's part][column's part][line][column], or, of lines, [image][line's
// part][line].
struct ImageCopy {
  CopyAxis lines, columns;
  CopyEdge edges[2];
  int64_t images, terms;  // terms: of a pixel, or of a line of the window
  int64_t pixel, plane;   // elements from a pixel to the next, and from the terms of a tile to those of the next
  int64_t positions;      // positions of the image in a line of the copy, if it has lines, else 0
  PV_FN int64_t planes() const { return (terms + PLANE - 1) / PLANE; }
  PV_FN int64_t part() const { return lines.length * columns.length; }
  PV_FN int64_t image() const { return lines.parts * columns.parts * part(); }
  PV_FN int64_t tiles() const { return lines.taps * columns.taps * planes(); }
  // Elements, including those past its end that tiles of the last line read.
  PV_FN int64_t size() const { return positions ? images * image() * pixel + planes() * PLANE : planes() * plane; }
  // The offset of the terms of a tile for the first row.
  PV_FN int64_t offset(int64_t tile) const {
    const int64_t tap = tile / planes(), t = tap / columns.taps, u = tap % columns.taps;
    const int64_t parts = t % lines.stride * columns.parts + u % columns.stride;
    return tile % planes() * plane + (parts * part() + lines.shift(t) * columns.length + columns.shift(u)) * pixel;
  }
};

// By how much the coordinate at an edge increases per position of an axis; false if rows and taps disagree about it.
inline bool edge_step(const CopyAxis& axis, int64_t row, int64_t tap, int64_t& step) {
  step = axis.rows > 1 ? row / axis.stride : axis.taps > 1 ? tap / axis.dilation : 0;
  return (axis.rows == 1 || row == step * axis.stride) && (axis.taps == 1 || tap == step * axis.dilation);
}

// The layout of the copy of a window; false if it cannot be copied.
inline bool plan_copy(const Window<bf16>& w, ImageCopy& p) {
  if (w.planes || w.channel_step != 1 || w.height() * w.area() * w.channels == 0) return false;
  if (w.rows[2].extent < MIN_LINE) return false;
  p = {copy_axis(w.rows[1], w.taps[0]), copy_axis(w.rows[2], w.taps[1]), {}, w.rows[0].extent, w.channels};
  if (p.lines.length == 0 || p.columns.length == 0) return false;
  for (int i : {0, 1}) {
    const Edge& from = w.edges[i];
    CopyEdge& edge = p.edges[i] = {from.first, from.extent, from.rows[0]};
    if (!edge_step(p.lines, from.rows[1], from.taps[0], edge.line)) return false;
    if (!edge_step(p.columns, from.rows[2], from.taps[1], edge.column) || edge.column < 0) return false;
  }
  if (w.channels % PLANE == 0) {
    p.pixel = PLANE;
    p.plane = (p.images * p.image() | 1) * PLANE;  // an odd number of cache lines, so planes use different cache sets
    return true;
  }
  CopyAxis& columns = p.columns;
  if (columns.step != w.channels || (columns.taps > 1 && columns.dilation != 1)) return false;
  p.terms = columns.taps * w.channels;
  p.pixel = columns.stride * w.channels;
  p.plane = PLANE;
  p.positions = (columns.rows - 1) * columns.stride + columns.taps;
  columns.length = (p.positions + columns.stride - 1) / columns.stride;
  columns.stride = columns.taps = columns.parts = 1, columns.dilation = 0;
  return true;
}

// Those of `positions`, which are `step` apart in a line from (image, y, x) on, that are in bounds.
PV_FN Span inside(const ImageCopy& p, int64_t image, int64_t y, int64_t x, int64_t step, Span positions) {
  for (const CopyEdge& edge : p.edges) {
    const int64_t first = edge.first + image * edge.image + y * edge.line + x * edge.column;
    positions.intersect(span_in_bounds(edge.extent, first, step * edge.column, positions.last));
  }
  return positions;
}

// Copy the pixels that the rows and taps of a window read, as planes, with zeros out of bounds.
inline void copy_planes(const Window<bf16>& w, const ImageCopy& p, bf16* to) {
  const int64_t planes = p.planes();
  for (int64_t image = 0; image < p.images; image++)
    for (int64_t line_part = 0; line_part < p.lines.parts; line_part++)
      for (int64_t column_part = 0; column_part < p.columns.parts; column_part++) {
        const Span lines = p.lines.pixels_read(line_part), columns = p.columns.pixels_read(column_part);
        const int64_t x = p.columns.position(column_part, 0);
        for (int64_t i = 0; i < p.lines.length; i++) {
          const int64_t y = p.lines.position(line_part, i);
          const Span span = inside(p, image, y, x, p.columns.stride, lines.contains(i) ? columns : Span{0, 0});
          const bf16* from = w.at + image * w.rows[0].step + y * p.lines.step + x * p.columns.step;
          for (int64_t j = 0; j < p.columns.length; j++, from += p.columns.stride * p.columns.step, to += PLANE)
            for (int64_t k = 0; k < planes; k++)
              copy_terms(from + k * PLANE, PLANE, span.contains(j), to + k * p.plane);
        }
      }
}

// Copy them as lines. False if not all of them are finite, which matters since they are multiplied by zero, too.
inline bool copy_lines(const Window<bf16>& w, const ImageCopy& p, bf16* copy) {
  constexpr uint16_t INFINITE = 0x7f80;
  std::memset(copy, 0, size_t(p.size()) * sizeof(bf16));
  const auto copy_some = [](const bf16* from, bf16* to, auto& infinite, const auto& n) PV_INLINE {
    const auto terms = load((const uint16_t*)from, n);
    infinite |= (terms.r[0] & INFINITE) == INFINITE;
    store<uint16_t>((uint16_t*)to, terms, n);
  };
  using Terms = Vec<uint16_t, PLANE>;
  decltype(typename Terms::reg() == typename Terms::reg()) infinite = {};
  bf16* to = copy;
  for (int64_t image = 0; image < p.images; image++)
    for (int64_t part = 0; part < p.lines.parts; part++) {
      const Span lines = p.lines.pixels_read(part);
      for (int64_t i = 0; i < p.lines.length; i++, to += p.columns.length * p.pixel) {
        if (!lines.contains(i)) continue;
        const int64_t y = p.lines.position(part, i), channels = p.columns.step;
        const Span span = inside(p, image, y, 0, 1, {0, p.positions});
        const bf16* line = w.at + image * w.rows[0].step + y * p.lines.step;
        int64_t j = span.first * channels;
        for (; j + PLANE <= span.last * channels; j += PLANE) copy_some(line + j, to + j, infinite, All<PLANE>());
        if (j < span.last * channels) copy_some(line + j, to + j, infinite, Some<PLANE>(span.last * channels - j));
      }
    }
  for (int k = 0; k < PLANE; k++)
    if (infinite[k]) return false;
  return true;
}

// Tiles of a copy, see `MatrixTiles`. offsets: the offset of the terms of each step.
struct ImageTiles {
  const bf16* first;
  int64_t rows, row, below;
  const int64_t* offsets;
  PV_FN const bf16* at() const { return first + *offsets; }
  PV_FN void next() { offsets++; }
};

// The rows of a product, divided into tiles: equal pieces of the lines of the result.
struct Pieces {
  int64_t line, rows, of_line, count;
  explicit Pieces(const ImageCopy& p) {
    line = p.columns.rows, rows = equal_part(line, AMX_TILE), of_line = (line + rows - 1) / rows;
    count = p.images * p.lines.rows * of_line;
  }
  PV_FN int64_t height(int64_t i) const { return i < count ? least(rows, line - i % of_line * rows) : 0; }
  PV_FN int64_t offset(const ImageCopy& p, int64_t i) const {
    const int64_t lines = i / of_line, image = lines / p.lines.rows, y = lines % p.lines.rows;
    return (image * p.image() + y * p.columns.length + i % of_line * rows) * p.pixel;
  }
};

// c[rows, C registers] (+)= `steps` tiles of terms of the copy, at `offsets`, times as many of b.
template <int C>
PV_FN void amx_image(
    BlockState& state, const ImageCopy& p, const bf16* copy, const int64_t* offsets, int64_t steps, const Rows& b,
    Sums c) {
  const Pieces pieces(p);
  for (int64_t i = 0; i < pieces.count; i += 2) {
    const int64_t above = pieces.height(i), below = pieces.height(i + 1), first = pieces.offset(p, i);
    const int64_t lower = below ? (pieces.offset(p, i + 1) - first) * int64_t(sizeof(bf16)) : 0;
    const ImageTiles tiles{copy + first, above, p.pixel * int64_t(sizeof(bf16)), lower, offsets};
    state.amx.configure(above, below ? below : above, AMX_TILE);
    if (below) amx_sums<C, true>(steps, AMX_TILE, tiles, b, c, nullptr, nullptr, state.prefetcher);
    else amx_sums<C, false>(steps, AMX_TILE, tiles, b, c, nullptr, nullptr, state.prefetcher);
    c.at += (above + below) * c.step;
  }
}

// Repack `lines` * `terms` terms of a panel, from `term` on, so that the terms of each line of the window begin a new
// tile.
inline void pair_terms(const float* panel, int64_t term, int64_t terms, int64_t lines, float* to) {
  using Unit = Vec<uint32_t, COLUMN>;
  const int64_t whole = terms / 2, units = (terms + PLANE - 1) / PLANE * AMX_TILE;
  for (; lines > 0; lines--, term += terms, to += units * COLUMNS) {
    std::memset(to + whole * COLUMNS, 0, size_t((units - whole) * COLUMNS) * sizeof(float));
    for (int64_t j = 0; j < COLUMNS; j += COLUMN) {
      const auto* at = (const uint32_t*)panel + term / 2 * COLUMNS + j;
      const auto unit = [&](int64_t i) PV_INLINE { return load(at + i * COLUMNS, All<COLUMN>()).r[0]; };
      const auto set = [&](int64_t i, typename Unit::reg a) PV_INLINE {
        store<uint32_t>((uint32_t*)to + i * COLUMNS + j, Unit{{a}}, All<COLUMN>());
      };
      const bool odd = term % 2;
      for (int64_t i = 0; !odd && i < whole; i++) set(i, unit(i));
      for (int64_t i = 0; odd && i < whole; i++) set(i, unit(i) >> 16 | unit(i + 1) << 16);
      if (terms % 2) set(whole, odd ? unit(whole) >> 16 : unit(whole) & 0xffff);
    }
  }
}

// c[m, n] = a[m, k] @ b[k, n], see `contract` of windows; false, with c unchanged, if windows cannot be copied.
template <class Right>
PV_SHARED bool contract_copied(int64_t n, int64_t k, const Window<bf16>& a, const Right& b, const Sums& c) {
  constexpr int T = TERMS<bf16>;
  ImageCopy p;
  if (!plan_copy(a, p)) return false;
  // Terms at a time: as many as fit in a panel, and whole lines of the window if these are repacked.
  const bool pairs = p.terms % PLANE != 0;
  const int64_t most = p.columns.rows > SHORT_LINE ? MANY_STEPS : FEW_STEPS;
  const int64_t step = pairs ? most / p.planes() * p.terms : most * PLANE;
  const int64_t copied = p.size() * int64_t(sizeof(bf16)), listed = p.tiles() * int64_t(sizeof(int64_t));
  if (step == 0 || copied + listed > MAX_COPY_BYTES) return false;
  auto* copy = (bf16*)__builtin_alloca_with_align(size_t(copied), 8 * LINE);
  auto* offsets = (int64_t*)__builtin_alloca_with_align(size_t(listed), 8 * LINE);
  constexpr int64_t PANEL = MANY_STEPS * AMX_TILE * COLUMNS;
  alignas(64) float columns[is_packed<Right> ? COLUMNS : PANEL], paired[PANEL];
  if (!p.positions) copy_planes(a, p, copy);
  else if (!copy_lines(a, p, copy) && pairs) return false;
  for (int64_t i = 0; i < p.tiles(); i++) offsets[i] = p.offset(i);
  const int64_t blocks = (Pieces(p).count + 1) / 2;  // of two tiles
  BlockState state;
  for (int64_t j = 0; j < n; j += COLUMNS) {
    const int64_t* next_offsets = offsets;
    for (int64_t t = 0; t < k; t += step) {
      const int64_t depth = least(step, k - t), tiles = pairs ? depth / p.terms * p.planes() : depth / PLANE;
      const int64_t loads = blocks * tiles * AMX_LOADS;
      const float* at = columns;
      // The next terms of the same columns are read next, else the first terms of the next columns.
      if constexpr (is_packed<Right>) {
        const int64_t bytes = units_of<bf16>(depth) * int64_t(sizeof(float[COLUMNS]));
        at = b(t / T, j);
        state.prefetcher = Prefetcher::over(b((t + depth) / T, j), bytes, 1, bytes, loads, MAX_PREFETCH_PANELS<bf16>);
      } else {
        const int64_t some = least(COLUMNS, n - j);
        pack_columns(b.from(t, j), depth, some, columns);
        if (a.padded && !a.zeros && !finite<bf16>(units_of<bf16>(depth), some, columns))
          return contract_each(n, k, a, b, c), true;
        const bool whole = t + depth >= k;
        state.prefetcher = {};
        if (!whole || j + COLUMNS < n)
          state.prefetcher = prefetcher_for(whole ? b.from(0, j + COLUMNS) : b.from(t + depth, j), least(depth, k - t),
                                            some, loads);
      }
      if (pairs) {
        pair_terms(at, is_packed<Right> ? t % T : 0, p.terms, depth / p.terms, paired);
        at = paired;
      }
      const Sums sums = c.after(t, depth, k).from(0, j);
      if (n - j <= COLUMN) amx_image<1>(state, p, copy, next_offsets, tiles, Rows{at, COLUMNS}, sums);
      else amx_image<2>(state, p, copy, next_offsets, tiles, Rows{at, COLUMNS}, sums);
      next_offsets += tiles;
    }
  }
  return true;
}

#endif

}  // namespace pv
