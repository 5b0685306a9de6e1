// Tiles of a matrix product: the sums of some rows and some panels, which stay in registers over all inputs.
//
// A weight format is a structure W:
//   W::panel_bytes(inputs)     bytes of a panel
//   W::row_bytes(inputs)       bytes of a prepared row
//   W::Few, W::Many            tiles for few and for many rows, see Tiles
//   W::accumulate<ROWS, PANELS>(panels, inputs, x, sums, next)
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

// What a tile requests of the weights that are read later, so that they arrive meanwhile. If several groups of rows pass over
// the same panels, they request the next ones together: each of them at every `groups`-th step. A single group requests what
// follows soon, except one or two rows of four panels: the CPU itself follows that many streams, faster than by requests.
struct NextPanels {
  int64_t distance;  // bytes
  int64_t groups;
  int64_t steps;  // to the next request
};
constexpr NextPanels SOON{8192, 1, 0}, NONE{0, 0, INT64_MAX / 2};

// A step that reads `bytes` of each panel from `at` on. Near the end of a panel, this is the begin of the next one. Prefetches
// into the L1 cache instead of L2 would fill its line fill buffers, and loads would wait for a free one.
template <int PANELS>
inline void prefetch(NextPanels& next, const uint8_t* at, int64_t panel_bytes, int64_t bytes) {
  if (--next.steps > 0) return;
  next.steps = next.groups;
  for (int i = 0; i < PANELS; ++i) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + i * panel_bytes + next.distance + line, 0, 2);
  }
}

template <class W, int ROWS, int PANELS>
__attribute__((noinline)) void tile(const uint8_t* panels, int64_t inputs, const uint8_t* prepared, int64_t rows,
                                    float* y, int64_t y_stride, bool add, NextPanels next) {
  // Rows beyond the last one repeat it and are not stored.
  const uint8_t* x[ROWS];
  for (int r = 0; r < ROWS; ++r) x[r] = prepared + (r < rows ? r : rows - 1) * W::row_bytes(inputs);
  Floats sums[ROWS][PANELS * PARTS];
  for (auto& row : sums) {
    for (Floats& vector : row) vector = broadcast(0.0f);
  }
  W::template accumulate<ROWS, PANELS>(panels, inputs, x, sums, next);
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
  NextPanels next = groups > 1 ? NextPanels{PANELS * W::panel_bytes(inputs), groups, 0} : PANELS == 4 && rows <= 2 ? NONE : SOON;
  for (int64_t row = 0; row < rows; row += size) {
    ++next.steps;
    const int64_t count = rows - row < size ? rows - row : size;
    const uint8_t* x = prepared + row * W::row_bytes(inputs);
    float* at = y + row * y_stride;
    // The least height that holds them.
    ((count <= HEIGHTS && (tile<W, HEIGHTS, PANELS>(panels, inputs, x, count, at, y_stride, add, next), true)) || ...);
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
