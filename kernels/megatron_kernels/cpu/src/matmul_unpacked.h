// Products of many rows with integer weights by the bfloat16 tiles of AMX. Some panels at a time are unpacked to bfloat16, in
// the layout of BFLOAT16, and multiplied with all rows. Inputs are bfloat16 too.

#if defined(__AMX_TILE__)

// Rows from which unpacking takes less time than it saves.
constexpr int64_t MIN_UNPACKED_ROWS = 24;
// Panels that are unpacked at once, and the memory for them on the stack. Matrices whose panel exceeds it are not unpacked.
constexpr int64_t UNPACKED_PANELS = 4, UNPACKED_BYTES = 512 << 10;

inline bool is_unpacked(int64_t format, int64_t inputs, int64_t rows) {
  const bool is_integer = format != FLOAT32 && format != BFLOAT16 && format != FLOAT16;
  return is_integer && rows >= MIN_UNPACKED_ROWS && Bfloat16Weights::panel_bytes(inputs) <= UNPACKED_BYTES;
}

// A block of 32 inputs of a panel: signed bytes of inputs 4 · word … 4 · word + 3, and scale and offset of each half.
struct PanelBlock {
  Integers words[8];
  Floats scales[2];
  Floats offsets[2];
};

inline PanelBlock read_block(Int8Weights, const uint8_t* panel, int64_t block) {
  PanelBlock read;
  const uint8_t* at = panel + block * Int8Weights::BLOCK_BYTES;
  NextPanels next = SOON;
  prefetch<1>(next, at, 0, Int8Weights::BLOCK_BYTES);
  for (int word = 0; word < 8; ++word) {
    read.words[word] = {_mm512_xor_si512(load_bytes(at + word * 64).v, _mm512_set1_epi8(-128))};
  }
  read.scales[0] = read.scales[1] = Int8Weights::scale(panel, block, 0);
  read.offsets[0] = read.offsets[1] = broadcast(0.0f);
  return read;
}

template <class W>
inline PanelBlock read_block(NibbleWeights<W>, const uint8_t* panel, int64_t block) {
  PanelBlock read;
  const uint8_t* at = panel + W::nibbles(block);
  NextPanels next = SOON;
  prefetch<1>(next, at, 0, W::BLOCK_BYTES);
  for (int word = 0; word < 4; ++word) {
    const auto [low, high] = NibbleWeights<W>::words(at, word, 0);
    read.words[word] = low;
    read.words[word + 4] = high;
  }
  read.scales[0] = read.scales[1] = W::scale(panel, block, 0);
  read.offsets[0] = read.offsets[1] = W::offset(panel, block, 0);
  return read;
}

template <class W>
inline PanelBlock read_block(PairWeights<W>, const uint8_t* panel, int64_t block) {
  PanelBlock read;
  const uint8_t* head = W::head(panel, block);
  const uint8_t* at = W::block_at(panel, block);
  NextPanels next = SOON;
  prefetch<1>(next, at, 0, W::BLOCK_BYTES);
  for (int word = 0; word < 8; ++word) {
    read.words[word] = {_mm512_sub_epi8(W::integers(at, word / 4, word % 4, 0).v, _mm512_set1_epi8(W::ZERO))};
  }
  for (int half = 0; half < 2; ++half) {
    read.scales[half] = W::scale(head, at, half, 0);
    read.offsets[half] = broadcast(0.0f);
    if constexpr (W::HAS_OFFSET) read.offsets[half] = W::offset(head, at, half, 0);
  }
  return read;
}

// Pairs of two vectors as bfloat16, to the nearest, halves to even: first[0], second[0], first[1] …
inline Integers bfloat16_pairs(Floats first, Floats second) {
  static constexpr uint16_t INTERLEAVED[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  return {_mm512_permutexvar_epi16(_mm512_loadu_si512(INTERLEAVED), both)};
}

// The signed byte `number` of each lane.
inline Floats byte_as_float(Integers words, int number) {
  const __m512i highest = _mm512_slli_epi32(words.v, 24 - 8 * number);
  return to_floats({_mm512_srai_epi32(highest, 24)});
}

// Unpack blocks first … end - 1 of a panel to bfloat16, as rounded from the float32 values of unpack_block().
template <class W>
__attribute__((noinline)) void unpack_blocks(const uint8_t* panel, int64_t first, int64_t end, uint8_t* to) {
  for (int64_t block = first; block < end; ++block) {
    const PanelBlock values = read_block(W{}, panel, block);
#pragma GCC unroll 8
    for (int word = 0; word < 8; ++word) {
      Floats x[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        x[k] = fma(byte_as_float(values.words[word], k), values.scales[word / 4], values.offsets[word / 4]);
      }
      _mm512_storeu_si512(to, bfloat16_pairs(x[0], x[1]).v);
      _mm512_storeu_si512(to + 64, bfloat16_pairs(x[2], x[3]).v);
      to += 128;
    }
  }
}

template <class W>
inline void multiply_unpacked(const Matrix& matrix, int64_t first, int64_t end, const uint8_t* prepared, int64_t rows, float* y,
                              int64_t y_stride, bool add) {
  alignas(64) uint8_t memory[UNPACKED_BYTES];
  multiply_chunks(matrix.inputs, prepared, rows, y, y_stride, add, [&](int64_t begin, TileProduct product) {
    product.weights = memory;
    product.panel_bytes = Bfloat16Weights::panel_bytes(product.inputs);
    const int64_t fit = UNPACKED_BYTES / product.panel_bytes, at_once = fit < UNPACKED_PANELS ? fit : UNPACKED_PANELS;
    for (int64_t panel = first; panel < end; panel += at_once, product.y += at_once * PANEL) {
      product.panels = end - panel < at_once ? end - panel : at_once;
      for (int64_t i = 0; i < product.panels; ++i) {
        const uint8_t* packed = matrix.panels + (panel + i) * W::panel_bytes(matrix.inputs);
        unpack_blocks<W>(packed, begin / BLOCK, (begin + product.inputs) / BLOCK, memory + i * product.panel_bytes);
      }
      multiply_by_tiles(product, rows);
    }
  });
}

#endif
