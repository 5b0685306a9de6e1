// Products of bfloat16 by the tiles of AMX, which hold 16 rows of 64 bytes. They read panels as all other instruction sets do:
// a tile of weights is 16 pairs of inputs of 16 outputs. Integers are unpacked
// to bfloat16 (matmul_unpacked.h) or multiplied by VNNI. In tiles of integers, each block of 32 inputs would have a scale, and
// the sums of a tile pass through memory to be scaled.

#if defined(__AMX_TILE__)

// Rows of one tile.
constexpr int64_t TILE_HEIGHT = 16;

// The shapes of the tiles, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t height, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// y = (y +) the sums of one tile, [rows][16].
inline void store_tile(const float (&sums)[TILE_HEIGHT][PANEL], int64_t rows, float* y, int64_t y_stride, bool add) {
  for (int64_t r = 0; r < rows; ++r, y += y_stride) store(y, add ? load(y) + load(sums[r]) : load(sums[r]));
}

// bfloat16: up to 32 rows and two panels. All numbers of rows use tiles, whose sums have an order of their own.
// Tiles 0 … 3: sums [row tile][panel]; 4, 5: activations; 6, 7: weights.
inline void multiply_bfloat16_tiles(const Matrix& matrix, int64_t first, int64_t end, const uint8_t* prepared, int64_t rows,
                                    float* y, int64_t y_stride, bool add) {
  constexpr int64_t INPUTS = 32;
  const int64_t panel_bytes = Bfloat16Weights::panel_bytes(matrix.inputs);
  const int64_t row_bytes = Bfloat16Weights::row_bytes(matrix.inputs);
  for (int64_t panel = first; panel < end; panel += 2, y += 2 * PANEL) {
    const uint8_t* weights = matrix.panels + panel * panel_bytes;
    const bool both_panels = panel + 1 < end;
    for (int64_t row = 0; row < rows; row += 2 * TILE_HEIGHT) {
      const int64_t upper = rows - row < TILE_HEIGHT ? rows - row : TILE_HEIGHT;
      const int64_t rest = rows - row - upper, lower = rest < TILE_HEIGHT ? rest : TILE_HEIGHT;
      TileShapes shapes;
      for (int i = 0; i < 2; ++i) {
        shapes.set(i, upper, 64);
        shapes.set(2 + i, lower > 0 ? lower : 1, 64);
        shapes.set(4 + i, i == 0 ? upper : lower > 0 ? lower : 1, 64);
        shapes.set(6 + i, 16, 64);
      }
      _tile_loadconfig(&shapes);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      const uint8_t* x = prepared + row * row_bytes;
      for (int64_t k = 0; k < matrix.inputs; k += INPUTS) {
        _tile_loadd(4, x + k * 2, row_bytes);
        _tile_loadd(6, weights + k * PANEL * 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (both_panels) {
          _tile_loadd(7, weights + panel_bytes + k * PANEL * 2, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (lower > 0) {
          _tile_loadd(5, x + TILE_HEIGHT * row_bytes + k * 2, row_bytes);
          _tile_dpbf16ps(2, 5, 6);
          if (both_panels) _tile_dpbf16ps(3, 5, 7);
        }
      }
      alignas(64) float sums[4][TILE_HEIGHT][PANEL];
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      for (int i = 0; i < (both_panels ? 2 : 1); ++i) {
        float* at = y + row * y_stride + i * PANEL;
        store_tile(sums[i], upper, at, y_stride, add);
        store_tile(sums[2 + i], lower, at + TILE_HEIGHT * y_stride, y_stride, add);
      }
    }
  }
  _tile_release();
}

#endif
