// Products of bfloat16 by the tiles of AMX, which hold 16 rows of 64 bytes. They read panels as all other instruction sets do:
// a tile of weights is 16 pairs of inputs of 16 outputs. Integers are unpacked to bfloat16 (matmul_unpacked.h) or multiplied by
// VNNI. In tiles of integers, each block of 32 inputs would have a scale, and the sums of a tile pass through memory to be
// scaled.
//
// Every number of rows uses tiles, because their sums have an order of their own. Tiles 0 … 3 hold the sums: of up to 16 rows
// and four panels, or of up to 32 rows and two panels.

#if defined(__AMX_TILE__)

// Rows of one tile, and inputs of one tile of bfloat16.
constexpr int64_t TILE_HEIGHT = 16;
constexpr int64_t TILE_INPUTS = 32;
// Bytes of all rows' inputs that stay in the L2 cache while panels pass: half of it. Tests define a smaller number.
#if !defined(MEGATRON_CHUNK_BYTES)
#define MEGATRON_CHUNK_BYTES (1 << 20)
#endif

// The shapes of the tiles, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t height) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = 64;
  }
};

// y = (y +) x · panels
struct TileProduct {
  int64_t inputs;
  const uint8_t* x;
  int64_t x_stride;  // bytes
  const uint8_t* weights;
  int64_t panel_bytes;
  int64_t panels;
  float* y;
  int64_t y_stride;  // bytes
  bool add;
};

// Up to 16 rows and four panels. Tile 4: activations; 6, 7: weights.
inline void multiply_four_panels(const TileProduct& product) {
  const auto& [inputs, x, x_stride, weights, panel_bytes, panels, y, y_stride, add] = product;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (add) {
    _tile_loadd(0, y, y_stride);
    if (panels > 1) _tile_loadd(1, y + PANEL, y_stride);
    if (panels > 2) _tile_loadd(2, y + 2 * PANEL, y_stride);
    if (panels > 3) _tile_loadd(3, y + 3 * PANEL, y_stride);
  }
  for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
    const uint8_t* at = weights + k * PANEL * 2;
    _tile_loadd(4, x + k * 2, x_stride);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (panels > 1) {
      _tile_loadd(7, at + panel_bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (panels > 2) {
      _tile_loadd(6, at + 2 * panel_bytes, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (panels > 3) {
      _tile_loadd(7, at + 3 * panel_bytes, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, y, y_stride);
  if (panels > 1) _tile_stored(1, y + PANEL, y_stride);
  if (panels > 2) _tile_stored(2, y + 2 * PANEL, y_stride);
  if (panels > 3) _tile_stored(3, y + 3 * PANEL, y_stride);
}

// 17 to 32 rows and up to two panels. Tiles 4, 5: activations; 6, 7: weights. `prefetch`: request the next two panels.
inline void multiply_two_panels(const TileProduct& product, bool prefetch) {
  const auto& [inputs, x, x_stride, weights, panel_bytes, panels, y, y_stride, add] = product;
  const uint8_t* lower_x = x + TILE_HEIGHT * x_stride;
  float* lower_y = y + TILE_HEIGHT * y_stride / static_cast<int64_t>(sizeof(float));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (add) {
    _tile_loadd(0, y, y_stride);
    _tile_loadd(2, lower_y, y_stride);
    if (panels > 1) {
      _tile_loadd(1, y + PANEL, y_stride);
      _tile_loadd(3, lower_y + PANEL, y_stride);
    }
  }
  for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
    const uint8_t* at = weights + k * PANEL * 2;
    for (int64_t line = 0; prefetch && line < TILE_INPUTS * PANEL * 2; line += 64) {
      __builtin_prefetch(at + 2 * panel_bytes + line, 0, 2);
      __builtin_prefetch(at + 3 * panel_bytes + line, 0, 2);
    }
    _tile_loadd(4, x + k * 2, x_stride);
    _tile_loadd(6, at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower_x + k * 2, x_stride);
    _tile_dpbf16ps(2, 5, 6);
    if (panels > 1) {
      _tile_loadd(7, at + panel_bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, y, y_stride);
  _tile_stored(2, lower_y, y_stride);
  if (panels > 1) {
    _tile_stored(1, y + PANEL, y_stride);
    _tile_stored(3, lower_y + PANEL, y_stride);
  }
}

// Configure the tiles: 6 and 7 whole, the others for at most 32 rows, of which 2, 3 and 5 hold those beyond 16.
inline void configure_tiles(int64_t rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, TILE_HEIGHT);
  if (rows <= TILE_HEIGHT) {
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, rows);
  } else {
    shapes.set(2, rows - TILE_HEIGHT);
    shapes.set(3, rows - TILE_HEIGHT);
    shapes.set(5, rows - TILE_HEIGHT);
  }
  // The compiler assumes that the instruction reads eight bytes.
  asm volatile("" ::"r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

// y = (y +) x · panels for any number of rows and panels.
inline void multiply_by_tiles(const TileProduct& all, int64_t rows) {
  constexpr int64_t BLOCK_ROWS = 2 * TILE_HEIGHT;
  // Whole blocks of rows first, so that the tiles are configured twice at most.
  for (int64_t row = 0, count; row < rows; row += count) {
    count = rows - row < BLOCK_ROWS ? rows - row : (rows - row) / BLOCK_ROWS * BLOCK_ROWS;
    const int64_t width = count <= TILE_HEIGHT ? 4 : 2;
    configure_tiles(count < BLOCK_ROWS ? count : BLOCK_ROWS);
    for (int64_t panel = 0; panel < all.panels; panel += width) {
      for (int64_t at = row; at < row + count; at += BLOCK_ROWS) {
        TileProduct product = all;
        product.x += at * all.x_stride;
        product.weights += panel * all.panel_bytes;
        product.panels = all.panels - panel < width ? all.panels - panel : width;
        product.y += at * (all.y_stride / static_cast<int64_t>(sizeof(float))) + panel * PANEL;
        if (count <= TILE_HEIGHT) {
          multiply_four_panels(product);
        } else {
          multiply_two_panels(product, at == row);
        }
      }
    }
  }
  _tile_release();
}

// Call multiply(begin, product) for each chunk of the inputs of many rows, from input `begin` on, without weights and panels.
// The tiles of a later chunk begin with the sums of the earlier ones in y, which changes no sum.
template <typename Multiply>
inline void multiply_chunks(int64_t inputs, const uint8_t* prepared, int64_t rows, float* y, int64_t y_stride, bool add,
                            Multiply multiply) {
  const int64_t fit = MEGATRON_CHUNK_BYTES / (rows * TILE_INPUTS * 2) * TILE_INPUTS, size = fit < TILE_INPUTS ? TILE_INPUTS : fit;
  for (int64_t begin = 0; begin < inputs; begin += size) {
    const int64_t count = inputs - begin < size ? inputs - begin : size;
    multiply(begin, TileProduct{count, prepared + begin * 2, Bfloat16Weights::row_bytes(inputs), nullptr, 0, 0, y,
                                y_stride * static_cast<int64_t>(sizeof(float)), add || begin > 0});
  }
}

inline void multiply_bfloat16_tiles(const Matrix& matrix, int64_t first, int64_t end, const uint8_t* prepared, int64_t rows,
                                    float* y, int64_t y_stride, bool add) {
  multiply_chunks(matrix.inputs, prepared, rows, y, y_stride, add, [&](int64_t begin, TileProduct product) {
    product.panel_bytes = Bfloat16Weights::panel_bytes(matrix.inputs);
    product.weights = matrix.panels + first * product.panel_bytes + Bfloat16Weights::panel_bytes(begin);
    product.panels = end - first;
    multiply_by_tiles(product, rows);
  });
}

#endif
