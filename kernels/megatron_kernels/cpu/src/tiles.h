// Tiles of a matrix product: the sums of some rows and some panels, which stay in registers over all inputs.
//
// A weight format is a structure W:
//   W::panel_bytes(inputs)     bytes of a panel
//   W::row_bytes(inputs)       bytes of a prepared row
//   W::Few, W::Many            tiles for few and for many rows, see Tiles
//   W::accumulate<ROWS, PANELS>(panels, inputs, x, sums)
//                              sums[row][vector] += x[row] · panels; x: prepared rows; vectors of LANES outputs
//
// Every sum has one accumulator in the order of inputs, whatever the tile. So a row's result depends neither on the rows
// beside it nor on the range of panels. Few rows read several panels at once, so that enough loads are under way; many
// rows share the loads of one or two panels.

constexpr int PARTS = PANEL / LANES;

// Tiles of a number of panels and of one of these numbers of rows, in ascending order.
template <int NUM_PANELS, int... HEIGHTS>
struct Tiles {
  static constexpr int64_t ALL[] = {HEIGHTS...};
  static constexpr int64_t MOST = ALL[sizeof...(HEIGHTS) - 1];
};

// Request what is read after the next AHEAD bytes of each panel: `bytes` from `at` on. Near the end of a panel, this is the
// begin of the next one.
template <int PANELS>
inline void prefetch(const uint8_t* at, int64_t panel_bytes, int64_t bytes) {
  constexpr int64_t AHEAD = 2048;
  for (int i = 0; i < PANELS; ++i) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + i * panel_bytes + AHEAD + line);
  }
}

template <class W, int ROWS, int PANELS>
__attribute__((noinline)) void tile(const uint8_t* panels, int64_t inputs, const uint8_t* prepared, int64_t rows,
                                    float* y, int64_t y_stride, bool add) {
  // Rows beyond the last one repeat it and are not stored.
  const uint8_t* x[ROWS];
  for (int r = 0; r < ROWS; ++r) x[r] = prepared + (r < rows ? r : rows - 1) * W::row_bytes(inputs);
  Floats sums[ROWS][PANELS * PARTS];
  for (auto& row : sums) {
    for (Floats& vector : row) vector = broadcast(0.0f);
  }
  W::template accumulate<ROWS, PANELS>(panels, inputs, x, sums);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    if (r >= rows) break;
    for (int i = 0; i < PANELS * PARTS; ++i) {
      float* at = y + r * y_stride + i * LANES;
      store(at, add ? load(at) + sums[r][i] : sums[r][i]);
    }
  }
}

// All rows by tiles of these heights and PANELS panels, in groups of equal size.
template <class W, int PANELS, int... HEIGHTS>
inline void multiply_rows(const uint8_t* panels, int64_t inputs, const uint8_t* prepared, int64_t rows, float* y,
                          int64_t y_stride, bool add) {
  constexpr int64_t MOST = Tiles<PANELS, HEIGHTS...>::MOST;
  const int64_t groups = (rows + MOST - 1) / MOST, size = (rows + groups - 1) / groups;
  for (int64_t row = 0; row < rows; row += size) {
    const int64_t count = rows - row < size ? rows - row : size;
    const uint8_t* x = prepared + row * W::row_bytes(inputs);
    float* at = y + row * y_stride;
    // The least height that holds them.
    ((count <= HEIGHTS && (tile<W, HEIGHTS, PANELS>(panels, inputs, x, count, at, y_stride, add), true)) || ...);
  }
}

template <class W, int PANELS, int... HEIGHTS>
inline void multiply_panels(Tiles<PANELS, HEIGHTS...>, const Matrix& matrix, int64_t first, int64_t end,
                            const uint8_t* prepared, int64_t rows, float* y, int64_t y_stride, bool add) {
  const int64_t bytes = W::panel_bytes(matrix.inputs);
  for (; first + PANELS <= end; first += PANELS, y += PANELS * PANEL) {
    const uint8_t* panels = matrix.panels + first * bytes;
    multiply_rows<W, PANELS, HEIGHTS...>(panels, matrix.inputs, prepared, rows, y, y_stride, add);
  }
  if constexpr (PANELS > 1) {
    multiply_panels<W>(Tiles<PANELS / 2, HEIGHTS...>{}, matrix, first, end, prepared, rows, y, y_stride, add);
  }
}

template <class W>
inline void multiply_by(const Matrix& matrix, int64_t first, int64_t end, const uint8_t* prepared, int64_t rows, float* y,
                        int64_t y_stride, bool add) {
  if (rows <= W::Few::MOST) {
    multiply_panels<W>(typename W::Few{}, matrix, first, end, prepared, rows, y, y_stride, add);
  } else {
    multiply_panels<W>(typename W::Many{}, matrix, first, end, prepared, rows, y, y_stride, add);
  }
}
