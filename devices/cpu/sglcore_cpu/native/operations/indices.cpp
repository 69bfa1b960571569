#include <algorithm>

#include "operations.h"

namespace sgl::SGL_ISA {

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

}  // namespace sgl::SGL_ISA
