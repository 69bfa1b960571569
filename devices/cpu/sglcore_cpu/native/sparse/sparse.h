// Attention over rows that lists name, and what stands around it in a layer. What differs between steps (slots, positions,
// lengths, lists, tables) is read when a kernel runs, so that a recorded call serves other contents at the same addresses.
//
// Rows of a pool have `row_type` (f32, bf16 or f16, or codes, of which `exact` and `group` say what rows.h says) and lie
// `.._stride` elements (of codes: bytes) apart; row 0 is nobody's. Other elements have `type` (f32 or bf16) unless a comment says otherwise; indices, slots and positions are i32.
#pragma once

#include "../operations/elements.h"

// out [tokens, heads, value_size] = softmax(scale * q . row) times the first value_size elements of those rows, over rows of
// `size` elements: chosen [tokens, width] of `rows` and more_chosen [tokens, more_width] of `more_rows`, up to the first -1
// of each. Rows of a list lie `chosen_stride` apart. `sinks` [heads] f32 are scores of one more key without a value; null means none.
#define SGL_MQA_ARGS(P, I, D)                                                                                     \
    P(q) I(q_stride) I(q_head_stride) P(out) P(sinks) I(tokens) I(heads) I(size) I(value_size) I(type) I(row_type) \
    I(exact) I(group) D(scale)
#define SGL_SPARSE_MQA_ARGS(P, I, D)                                                                              \
    SGL_MQA_ARGS(P, I, D) P(rows) I(row_stride) P(chosen) I(chosen_stride) I(width)                               \
    P(more_rows) I(more_row_stride) P(more_chosen) I(more_chosen_stride) I(more_width)
SGL_ARGS(SparseMqaArgs, SGL_SPARSE_MQA_ARGS)

// Where the first lens[t] rows of a token's request lie: row i is table[slot][i / page_rows] * page_rows + i % page_rows.
#define SGL_PAGED_ARGS(P, I) P(table) I(table_stride) P(token_slots) P(lens) I(page_rows)

// The same over these.
#define SGL_PAGED_MQA_ARGS(P, I, D) SGL_MQA_ARGS(P, I, D) P(rows) I(row_stride) SGL_PAGED_ARGS(P, I)
SGL_ARGS(PagedMqaArgs, SGL_PAGED_MQA_ARGS)

// out f32 [tokens, width]: scale * sum over h of weights[t, h] * max(q[t, h] . key, 0) for these; -inf behind them. Weights
// have `weight_type`.
#define SGL_INDEX_LOGITS_ARGS(P, I, D)                                                                            \
    P(q) I(q_stride) I(q_head_stride) P(weights) I(weight_stride) I(weight_type) P(keys) I(key_stride) P(out)      \
    I(tokens) I(heads) I(size) I(width) I(type) I(row_type) I(exact) I(group) D(scale) SGL_PAGED_ARGS(P, I)
SGL_ARGS(IndexLogitsArgs, SGL_INDEX_LOGITS_ARGS)

// out [tokens, k]: the rows of the k largest of logits f32 [tokens, width] among the first lens[t], of equal ones the
// first, ascending by place; -1 behind them. NaN is the largest.
#define SGL_INDEX_TOP_K_ARGS(P, I, D) P(logits) I(logits_stride) P(out) I(tokens) I(width) I(k) SGL_PAGED_ARGS(P, I)
SGL_ARGS(IndexTopKArgs, SGL_INDEX_TOP_K_ARGS)

// Values and gates side by side, [.., 2 * width]: kv_gate [tokens] of `type`, state f32. Event n reads `span` tokens: token
// i >= 0, row -2 - i of the state for i < -1, nothing for -1; out [events, width * ratio / span]. Then token t goes to row
// writes[t] (of `index_bytes`) of the state.
#define SGL_COMPRESS_ARGS(P, I, D)                                                                                \
    P(kv_gate) I(kv_gate_stride) P(state) I(state_stride) P(ape) P(reads) P(writes) I(index_bytes) P(out)          \
    I(tokens) I(events) I(span) I(ratio) I(width) I(type)
SGL_ARGS(CompressArgs, SGL_COMPRESS_ARGS)

// The plan of `compress`, as the kernel table says; out_rows and writes have `index_bytes`. Null: starts (row b is token b), state_table,
// state_offsets (0).
#define SGL_COMPRESS_PLAN_ARGS(P, I, D)                                                                           \
    P(slots) P(seq_lens) P(lengths) P(starts) P(positions) P(table) I(table_stride) P(state_table)                 \
    I(state_table_stride) I(state_pages) P(state_offsets) I(page_size) I(ratio) I(ring) P(reads)                  \
    P(block_positions) P(out_rows) I(out_bytes) P(writes) I(write_bytes) I(rows) I(tokens) I(events) I(span)
SGL_ARGS(CompressPlanArgs, SGL_COMPRESS_PLAN_ARGS)

// out [tokens, width]: of the last `width` tokens up to each, or of its complete blocks of `ratio` where that is not 0.
#define SGL_LIST_ARGS(P, I, D)                                                                                    \
    P(table) I(table_stride) P(token_slots) P(positions) P(out) I(tokens) I(width) I(page_size) I(ratio)
SGL_ARGS(ListArgs, SGL_LIST_ARGS)

// cos_sin f32 [.., rotary]: cosines, then sines. out [tokens, heads, size], each head of root mean square 1 if `norms`,
// its last `rotary` elements turned in pairs of neighbours.
#define SGL_ROPE_TAIL_ARGS(P, I, D)                                                                               \
    P(x) I(x_stride) I(x_head_stride) P(out) P(positions) P(cos_sin) I(cos_sin_stride) I(tokens) I(heads) I(size) \
    I(rotary) I(norms) D(eps) I(inverse) I(type)
SGL_ARGS(RopeTailArgs, SGL_ROPE_TAIL_ARGS)

// Row out_rows[t] = the norm of x[t], turned. Without a bias: the root mean square norm of the first `normed` elements, the
// last ones turned in pairs of neighbours; with one: the layer norm of all, the first ones turned in pairs half of
// `rotary` apart. weight and bias f32.
#define SGL_NORM_STORE_ARGS(P, I, D)                                                                              \
    P(x) I(x_stride) P(weight) P(bias) I(normed) D(eps) P(positions) P(cos_sin) I(cos_sin_stride) I(rotary)       \
    P(rows) I(row_stride) P(out_rows) I(index_bytes) I(tokens) I(size) I(type) I(row_type) I(exact) I(group)
SGL_ARGS(NormStoreArgs, SGL_NORM_STORE_ARGS)

// out [tokens, groups, outputs] = weight[g] x[t, g]; weight elements at g * group_stride + output * output_stride + input *
// input_stride, one of the latter two being 1.
#define SGL_GROUPED_ARGS(P, I, D)                                                                                 \
    P(x) I(x_stride) I(x_group_stride) P(weight) I(group_stride) I(output_stride) I(input_stride) P(out)          \
    I(tokens) I(groups) I(outputs) I(inputs) I(type)
SGL_ARGS(GroupedArgs, SGL_GROUPED_ARGS)

// h [tokens, streams, size]; fn [mixes, streams * size], base [mixes], scale, post [tokens, streams] and comb [tokens, streams,
// streams] f32; x [tokens, size]. `mixes` is (2 + streams) * streams, or `streams` where post and comb are null.
#define SGL_HC_PRE_ARGS(P, I, D)                                                                                  \
    P(h) I(h_stride) P(fn) P(base) P(scale) P(x) P(post) P(comb) I(tokens) I(streams) I(size) D(norm_eps) D(hc_eps) I(iters) I(type)
SGL_ARGS(HcPreArgs, SGL_HC_PRE_ARGS)

// out[t, k] = post[t, k] * x[t] + the sum over j of comb[t, j, k] * h[t, j].
#define SGL_HC_POST_ARGS(P, I, D) \
    P(x) I(x_stride) P(h) I(h_stride) P(post) P(comb) P(out) I(tokens) I(streams) I(size) I(type)
SGL_ARGS(HcPostArgs, SGL_HC_POST_ARGS)

namespace sgl::SGL_ISA {

void sparse_mqa(const SparseMqaArgs& args, Pool& pool);
void paged_mqa(const PagedMqaArgs& args, Pool& pool);
void index_logits(const IndexLogitsArgs& args, Pool& pool);
void index_top_k(const IndexTopKArgs& args, Pool& pool);
void compress(const CompressArgs& args, Pool& pool);
void compress_plan(const CompressPlanArgs& args, Pool& pool);
void list_rows(const ListArgs& args, Pool& pool);
void rope_tail(const RopeTailArgs& args, Pool& pool);
void norm_store(const NormStoreArgs& args, Pool& pool);
void grouped_linear(const GroupedArgs& args, Pool& pool);
void hc_pre(const HcPreArgs& args, Pool& pool);
void hc_post(const HcPostArgs& args, Pool& pool);

SGL_INLINE int32_t i32_at(const void* values, int64_t i) { return static_cast<const int32_t*>(values)[i]; }

SGL_INLINE void put_index(void* indices, int64_t bytes, int64_t i, int64_t value) {
    if (bytes == 4) static_cast<int32_t*>(indices)[i] = static_cast<int32_t>(value);
    else static_cast<int64_t*>(indices)[i] = value;
}

// The rows of one token's request.
struct Pages {
    const int32_t* pages;
    int64_t page_rows, count;

    template <class Args>
    Pages(const Args& args, int64_t token) : page_rows(args.page_rows) {
        pages = row_of<int32_t>(args.table, i32_at(args.token_slots, token), args.table_stride);
        count = i32_at(args.lens, token);
    }
    int64_t row(int64_t place) const { return pages[place / page_rows] * page_rows + place % page_rows; }
};

}  // namespace sgl::SGL_ISA
