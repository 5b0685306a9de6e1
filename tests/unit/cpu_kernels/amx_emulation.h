// The instructions of AMX that the kernels use, in C++, for CPUs without them. Included before every translation unit.

#pragma once

#if defined(__AMX_TILE__)

// Products of the test's sizes have several chunks of inputs.
#define MEGATRON_CHUNK_BYTES (16 << 10)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace amx_emulation {

struct Tiles {
  uint8_t shapes[64];
  uint8_t data[8][16][64];
  int64_t height(int tile) const { return shapes[48 + tile]; }
  int64_t width(int tile) const { return shapes[16 + 2 * tile] | shapes[17 + 2 * tile] << 8; }
};

inline thread_local Tiles tiles;

inline void load_shapes(const void* shapes) {
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(tiles.shapes, shapes, 64);
}
inline void load(int tile, const void* from, int64_t stride) {
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
  for (int64_t row = 0; row < tiles.height(tile); ++row) {
    std::memcpy(tiles.data[tile][row], static_cast<const uint8_t*>(from) + row * stride, static_cast<size_t>(tiles.width(tile)));
  }
}
inline void store(int tile, void* to, int64_t stride) {
  for (int64_t row = 0; row < tiles.height(tile); ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles.data[tile][row], static_cast<size_t>(tiles.width(tile)));
  }
}

inline float bfloat16(const uint8_t* x) {
  const uint32_t bits = static_cast<uint32_t>(x[0]) << 16 | static_cast<uint32_t>(x[1]) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// sums[row][column] += a[row] · b[column], of pairs, whose first and second products are summed apart.
inline void multiply_bfloat16(int sums, int a, int b) {
  for (int64_t row = 0; row < tiles.height(sums); ++row) {
    for (int64_t column = 0; column < tiles.width(sums) / 4; ++column) {
      float sum, first = 0.0f, second = 0.0f;
      std::memcpy(&sum, &tiles.data[sums][row][4 * column], 4);
      for (int64_t k = 0; k < tiles.width(a) / 4; ++k) {
        const uint8_t* x = &tiles.data[a][row][4 * k];
        const uint8_t* y = &tiles.data[b][k][4 * column];
        first = __builtin_fmaf(bfloat16(x), bfloat16(y), first);
        second = __builtin_fmaf(bfloat16(x + 2), bfloat16(y + 2), second);
      }
      sum += first + second;
      std::memcpy(&tiles.data[sums][row][4 * column], &sum, 4);
    }
  }
}

}  // namespace amx_emulation

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_emulation::load_shapes
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) amx_emulation::load(tile, from, stride)
#define _tile_stored(tile, to, stride) amx_emulation::store(tile, to, stride)
#define _tile_zero(tile) std::memset(amx_emulation::tiles.data[tile], 0, 1024)
#define _tile_dpbf16ps amx_emulation::multiply_bfloat16

#endif
