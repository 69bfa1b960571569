// The tiles of AMX: eight of at most 16 rows of 64 bytes. Where SGL_EMULATE is set the same calls work on plain memory.
#pragma once

#include "isa.h"

#if SGL_LEVEL >= 6

namespace sgl::SGL_ISA {

// Shapes of the eight tiles, as the instruction reads them (palette 1).
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int tile_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

#ifndef SGL_EMULATE

SGL_INLINE void tile_barrier() { asm volatile("" : : : "memory"); }
// The barriers keep stores to the shapes before the instruction that reads them; some compilers drop them otherwise.
SGL_INLINE void tile_configure(const TileShapes& shapes) {
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
    asm volatile("" : : : "memory");
}
SGL_INLINE void tile_release() { _tile_release(); }
#define SGL_TILE_ZERO(t) _tile_zero(t)
// The instruction does not say that it reads memory: without the barrier stores before it may come after.
#define SGL_TILE_LOAD(t, p, stride) do { tile_barrier(); _tile_loadd(t, p, stride); } while (0)
#define SGL_TILE_STREAM(t, p, stride) do { tile_barrier(); _tile_stream_loadd(t, p, stride); } while (0)
#define SGL_TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define SGL_TILE_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define SGL_TILE_S8S8(c, a, b) _tile_dpbssd(c, a, b)
#define SGL_TILE_S8U8(c, a, b) _tile_dpbsud(c, a, b)
#define SGL_TILE_U8S8(c, a, b) _tile_dpbusd(c, a, b)

#else

struct EmulatedTiles {
    TileShapes shapes;
    alignas(64) uint8_t bytes[8][16][64];
};
inline EmulatedTiles& tiles() {
    static thread_local EmulatedTiles state;
    return state;
}
inline void tile_configure(const TileShapes& shapes) {
    tiles().shapes = shapes;
    std::memset(tiles().bytes, 0, sizeof(tiles().bytes));
}
inline void tile_release() { tiles().shapes = TileShapes{}; }
inline void tile_load(int t, const void* p, int64_t stride) {
    auto& state = tiles();
    for (int row = 0; row < state.shapes.rows[t]; ++row)
        std::memcpy(state.bytes[t][row], static_cast<const char*>(p) + row * stride, state.shapes.row_bytes[t]);
}
inline void tile_store(int t, void* p, int64_t stride) {
    auto& state = tiles();
    for (int row = 0; row < state.shapes.rows[t]; ++row)
        std::memcpy(static_cast<char*>(p) + row * stride, state.bytes[t][row], state.shapes.row_bytes[t]);
}
inline void tile_dot_bf16(int c, int a, int b) {
    auto& state = tiles();
    for (int m = 0; m < state.shapes.rows[c]; ++m)
        for (int n = 0; n < state.shapes.row_bytes[c] / 4; ++n) {
            float* sum = reinterpret_cast<float*>(state.bytes[c][m]) + n;
            for (int k = 0; k < state.shapes.row_bytes[a] / 4; ++k)
                for (int i = 0; i < 2; ++i)
                    *sum += from_bf16(reinterpret_cast<bf16*>(state.bytes[a][m])[2 * k + i]) *
                            from_bf16(reinterpret_cast<bf16*>(state.bytes[b][k])[2 * n + i]);
        }
}
template <class A, class B>
void tile_dot_bytes(int c, int a, int b) {
    auto& state = tiles();
    for (int m = 0; m < state.shapes.rows[c]; ++m)
        for (int n = 0; n < state.shapes.row_bytes[c] / 4; ++n) {
            int32_t* sum = reinterpret_cast<int32_t*>(state.bytes[c][m]) + n;
            for (int k = 0; k < state.shapes.row_bytes[a]; ++k)
                *sum += static_cast<int32_t>(static_cast<A>(state.bytes[a][m][k])) *
                        static_cast<int32_t>(static_cast<B>(state.bytes[b][k / 4][4 * n + k % 4]));
        }
}
#define SGL_TILE_ZERO(t) std::memset(tiles().bytes[t], 0, sizeof(tiles().bytes[t]))
#define SGL_TILE_LOAD(t, p, stride) tile_load(t, p, stride)
#define SGL_TILE_STREAM(t, p, stride) tile_load(t, p, stride)
#define SGL_TILE_STORE(t, p, stride) tile_store(t, p, stride)
#define SGL_TILE_BF16(c, a, b) tile_dot_bf16(c, a, b)
#define SGL_TILE_S8S8(c, a, b) (tile_dot_bytes<int8_t, int8_t>(c, a, b))
#define SGL_TILE_S8U8(c, a, b) (tile_dot_bytes<int8_t, uint8_t>(c, a, b))
#define SGL_TILE_U8S8(c, a, b) (tile_dot_bytes<uint8_t, int8_t>(c, a, b))

#endif

}  // namespace sgl::SGL_ISA

#endif
