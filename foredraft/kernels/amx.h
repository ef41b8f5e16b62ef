// Tiles: AMX multiplies up to 16 rows with 16 columns in one instruction.
//
// A tile is up to 16 rows of 64 bytes; the fewer rows are multiplied, the less it costs. sums[m][n] +=
// the products of row m of one tile with column n of another, whose rows hold what belongs together
// (2 bfloat16, 4 bytes) side by side for every n.
// On other CPUs the tests run the same code with FOREDRAFT_EMULATE_TILES: plain C++ that rounds as
// the instruction does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "simd.h"

namespace foredraft {

constexpr int kTileRows = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;

// How many rows each tile has, and how many bytes a row of it.
struct TileShape {
  uint8_t rows[8];
  uint8_t bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
};

// What the instruction computes: float32 multiply-adds, rounded to nearest even, where subnormal
// numbers count as zeros. Even and odd inputs are summed apart from each other, and their sum is
// added to what is there.
inline float without_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? x * 0.0f : x; }

inline float tile_fma(float a, float b, float c) {
  return without_subnormal(std::fma(without_subnormal(a), without_subnormal(b), c));
}

inline float tile_sum(float a, float b) { return without_subnormal(a + b); }

// sums[M, 16] += rows[M, 16 pairs] . columns[16 pairs, 16]
inline void emulated_tile_product(int M, const bf16* rows, const bf16* columns, float* sums) {
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        even = tile_fma(to_float(rows[32 * m + 2 * k]), to_float(columns[32 * k + 2 * n]), even);
        odd = tile_fma(to_float(rows[32 * m + 2 * k + 1]), to_float(columns[32 * k + 2 * n + 1]), odd);
      }
      sums[16 * m + n] = tile_sum(sums[16 * m + n], tile_sum(even, odd));
    }
}

// sums[M, 16] += rows[M, quads of digits] . columns[quads of unsigned bytes, 16]; exact
inline void emulated_byte_product(int M, int quads, const int8_t* rows, const uint8_t* columns,
                                  int32_t* sums) {
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < 16; ++n)
      for (int k = 0; k < 4 * quads; ++k)
        sums[16 * m + n] += rows[kTileRowBytes * m + k] * columns[64 * (k / 4) + 4 * n + k % 4];
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr bool kTiles = true, kEmulatesTiles = false;

// Whether the system lets this process use tiles: it keeps room for their state only on request.
inline bool tiles_allowed() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // of Linux: arch_prctl(2)
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// While this lives, the thread may use tiles of this shape, or of others meanwhile.
class TileSession {
 public:
  explicit TileSession(TileShape tiles) : tiles_(tiles) { resume(); }
  ~TileSession() {
    if (tiles_allowed()) asm volatile("tilerelease");
  }
  TileSession(const TileSession&) = delete;

  void resume() const { shape(tiles_); }

  // Gives the thread's tiles another shape; what they held is lost.
  static void shape(TileShape tiles) {
    if (!tiles_allowed()) return;
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = tiles.rows[tile];
      config.bytes[tile] = tiles.bytes[tile];
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

 private:
  const TileShape tiles_;
};

// The thread's tiles, in the shape that they have.
struct Tiles {
  explicit Tiles(TileShape) {}

  template <int kTile>
  void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(kTile)); }

  template <int kTile>
  void load(const void* source, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  void store(void* target, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(stride), "i"(kTile) : "memory");
  }

  // kSums += kRows . kColumns
  template <int kSums, int kRows, int kColumns>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
  }

  // The same in whole numbers: signed bytes in rows, unsigned ones in columns.
  template <int kSums, int kRows, int kColumns>
  void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
  }
};

#elif defined(FOREDRAFT_EMULATE_TILES)

constexpr bool kTiles = true, kEmulatesTiles = true;

inline bool tiles_allowed() { return true; }

struct TileSession {
  explicit TileSession(TileShape) {}
  void resume() const {}
  static void shape(TileShape) {}
};

class Tiles {
 public:
  explicit Tiles(TileShape shape) : shape_(shape) {}

  template <int kTile>
  void zero() { std::memset(tiles_[kTile], 0, kTileBytes); }

  template <int kTile>
  void load(const void* source, int64_t stride) {
    for (int64_t row = 0; row < shape_.rows[kTile]; ++row)
      std::memcpy(tiles_[kTile] + row * kTileRowBytes,
                  static_cast<const char*>(source) + row * stride, shape_.bytes[kTile]);
  }

  template <int kTile>
  void store(void* target, int64_t stride) {
    for (int64_t row = 0; row < shape_.rows[kTile]; ++row)
      std::memcpy(static_cast<char*>(target) + row * stride, tiles_[kTile] + row * kTileRowBytes,
                  shape_.bytes[kTile]);
  }

  template <int kSums, int kRows, int kColumns>
  void multiply() {
    emulated_tile_product(shape_.rows[kRows], reinterpret_cast<const bf16*>(tiles_[kRows]),
                          reinterpret_cast<const bf16*>(tiles_[kColumns]),
                          reinterpret_cast<float*>(tiles_[kSums]));
  }

  template <int kSums, int kRows, int kColumns>
  void multiply_bytes() {
    emulated_byte_product(shape_.rows[kRows], shape_.rows[kColumns],
                          reinterpret_cast<const int8_t*>(tiles_[kRows]),
                          reinterpret_cast<const uint8_t*>(tiles_[kColumns]),
                          reinterpret_cast<int32_t*>(tiles_[kSums]));
  }

 private:
  const TileShape shape_;
  alignas(64) char tiles_[8][kTileBytes];
};

#else

constexpr bool kTiles = false, kEmulatesTiles = false;

inline bool tiles_allowed() { return false; }

struct TileSession {
  explicit TileSession(TileShape) {}
  void resume() const {}
  static void shape(TileShape) {}
};

struct Tiles {
  explicit Tiles(TileShape) {}
  template <int kTile> void zero() {}
  template <int kTile> void load(const void*, int64_t) {}
  template <int kTile> void store(void*, int64_t) {}
  template <int kSums, int kRows, int kColumns> void multiply() {}
  template <int kSums, int kRows, int kColumns> void multiply_bytes() {}
};

#endif

}  // namespace foredraft
