#include <algorithm>

#include "elements.h"

// out[r] = weight[ids[r]]: rows of row_bytes.
#define SGL_EMBEDDING_ARGS(P, I, D) P(ids) I(ids_bytes) P(weight) I(weight_stride) P(out) I(rows) I(row_bytes)
SGL_ARGS(EmbeddingArgs, SGL_EMBEDDING_ARGS)

// out[t] = page_table[slots[t], positions[t] / page_size] * page_size + positions[t] % page_size.
#define SGL_CACHE_LOCATIONS_ARGS(P, I, D) \
    P(page_table) I(table_stride) P(slots) P(positions) I(page_size) P(out) I(out_bytes) I(tokens)
SGL_ARGS(CacheLocationsArgs, SGL_CACHE_LOCATIONS_ARGS)

namespace sgl::SGL_ISA {

namespace {

void embedding(const EmbeddingArgs& args, Pool& pool) {
    auto bytes = static_cast<size_t>(args.row_bytes);
    each_row(pool, args.rows, args.row_bytes / 2, [&](int64_t row, int) {
        int64_t id = index_at(args.ids, args.ids_bytes, row);
        std::memcpy(row_of<char>(args.out, row, args.row_bytes), row_of<char>(args.weight, id, args.weight_stride), bytes);
    });
}

void cache_locations(const CacheLocationsArgs& args, Pool& pool) {
    const auto* slots = static_cast<const int32_t*>(args.slots);
    const auto* positions = static_cast<const int32_t*>(args.positions);
    each_row(pool, args.tokens, 8, [&](int64_t token, int) {
        const int32_t* pages = row_of<int32_t>(args.page_table, slots[token], args.table_stride);
        int64_t page = pages[positions[token] / args.page_size], offset = positions[token] % args.page_size;
        int64_t cell = page * args.page_size + offset;
        if (args.out_bytes == 4)
            static_cast<int32_t*>(args.out)[token] = static_cast<int32_t>(cell);
        else
            static_cast<int64_t*>(args.out)[token] = cell;
    });
}

}  // namespace

SGL_KERNELS(operations_indices,
    SGL_KERNEL("embedding", embedding, EmbeddingArgs),
    SGL_KERNEL("cache_locations", cache_locations, CacheLocationsArgs))

}  // namespace sgl::SGL_ISA
