// The small operations of a layer. Element types are f32 or bf16 (`type`); strides are elements from row to row; indices
// are i32 or i64 (`..._bytes`). Where the reference casts to the element type between two operations, so do these.
#pragma once

#include "elements.h"

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, the product of `weight_type`. A row is [inner] rows of an outer one: row
// r begins at (r / inner) * outer_stride + (r % inner) * inner_stride.
#define SGL_RMS_NORM_ARGS(P, I, D) \
    P(x) I(outer_stride) I(inner) I(inner_stride) P(weight) P(out) I(rows) I(width) I(type) I(weight_type) D(eps)
SGL_ARGS(RmsNormArgs, SGL_RMS_NORM_ARGS)

// residual += x, x = the norm of that.
#define SGL_ADD_RMS_NORM_ARGS(P, I, D) \
    P(x) I(x_stride) P(residual) I(residual_stride) P(weight) I(rows) I(width) I(type) I(weight_type) D(eps)
SGL_ARGS(AddRmsNormArgs, SGL_ADD_RMS_NORM_ARGS)

#define SGL_LAYER_NORM_ARGS(P, I, D) P(x) I(x_stride) P(weight) P(bias) P(out) I(rows) I(width) I(type) D(eps)
SGL_ARGS(LayerNormArgs, SGL_LAYER_NORM_ARGS)

// out [rows, width]; x [rows, 2 * width] for those that multiply, [rows, width] for gelu.
#define SGL_ACTIVATION_ARGS(P, I, D) P(x) I(x_stride) P(out) I(rows) I(width) I(type)
SGL_ARGS(ActivationArgs, SGL_ACTIVATION_ARGS)

// A gate of at most `limit`, and what it opens within it.
#define SGL_LIMITED_ACTIVATION_ARGS(P, I, D) SGL_ACTIVATION_ARGS(P, I, D) D(limit)
SGL_ARGS(LimitedActivationArgs, SGL_LIMITED_ACTIVATION_ARGS)

// q and k rotated to q_out and k_out, v copied to v_out (none if v is null). k_out and v_out have `store_type` and are
// rows of a cache where `cells` is not null; else k_out's rows are those of k. Norms of each head before, where q_norm is
// not null, with weights of `norm_type`. cos_sin [.., rotary_dim] f32: cosines, then sines.
#define SGL_ROTATE_ARGS(P, I, D)                                                                               \
    P(q) I(q_stride) P(k) I(k_stride) P(v) I(v_stride) P(q_out) P(k_out) P(v_out) I(out_stride) P(cells)       \
    I(cells_bytes) P(positions) I(positions_bytes) P(cos_sin) I(cos_sin_stride) P(q_norm) P(k_norm) D(eps)     \
    I(tokens) I(q_heads) I(kv_heads) I(head_dim) I(rotary_dim) I(type) I(store_type) I(norm_type)
SGL_ARGS(RotateArgs, SGL_ROTATE_ARGS)

// Rows of x cast into rows of out, and of y into second, which may be null; row r goes to row cells[r] where cells is not
// null.
#define SGL_COPY_ROWS_ARGS(P, I, D)                                                                         \
    P(x) I(x_stride) P(y) I(y_stride) P(out) P(second) I(out_stride) P(cells) I(cells_bytes) I(rows) I(width) \
    I(type) I(out_type)
SGL_ARGS(CopyRowsArgs, SGL_COPY_ROWS_ARGS)

// out[r] = weight[ids[r]]: rows of row_bytes.
#define SGL_EMBEDDING_ARGS(P, I, D) P(ids) I(ids_bytes) P(weight) I(weight_stride) P(out) I(rows) I(row_bytes)
SGL_ARGS(EmbeddingArgs, SGL_EMBEDDING_ARGS)

// out[t] = page_table[slots[t], positions[t] / page_size] * page_size + positions[t] % page_size.
#define SGL_CACHE_LOCATIONS_ARGS(P, I, D) \
    P(page_table) I(table_stride) P(slots) P(positions) I(page_size) P(out) I(out_bytes) I(tokens)
SGL_ARGS(CacheLocationsArgs, SGL_CACHE_LOCATIONS_ARGS)

// As the table's entries of these names say; all arrays are int32, a row of proposals has proposals_stride of them.
#define SGL_PLACE_PROPOSALS_ARGS(P, I, D)                                                                               \
    P(last) P(lengths) P(proposals) I(proposals_stride) P(slots) P(limits) P(nodes) P(ids) P(positions) P(seq_lens) P(owners) \
    I(requests) I(width)
SGL_ARGS(PlaceProposalsArgs, SGL_PLACE_PROPOSALS_ARGS)
#define SGL_ACCEPT_PROPOSALS_ARGS(P, I, D)                                                                        \
    P(drawn) P(owners) P(slots) P(limits) P(last) P(lengths) P(proposals) I(proposals_stride) P(runs) I(requests) I(width)
SGL_ARGS(AcceptProposalsArgs, SGL_ACCEPT_PROPOSALS_ARGS)

// The same of trees. Scores, chances, sums and reached are f32, all else i32; a row of tokens and scores has `stride` of them, where
// `parents` and `chances` may be null. `leaders` are those of all beams of a request, `most` its records.
#define SGL_TREE_EXPAND_ARGS(P, I, D)                                                                                    \
    P(tokens) I(tokens_stride) P(scores) I(scores_stride) P(parents) P(chances) I(first) P(records) P(sums) P(beams) P(reached) \
    I(requests) I(leaders) I(width) I(most)
SGL_ARGS(TreeExpandArgs, SGL_TREE_EXPAND_ARGS)
#define SGL_TREE_BUILD_ARGS(P, I, D) P(records) P(sums) P(depths) P(tree) I(requests) I(most) I(nodes)
SGL_ARGS(TreeBuildArgs, SGL_TREE_BUILD_ARGS)
#define SGL_TREE_PLACE_ARGS(P, I, D)                                                                        \
    P(tokens) I(tokens_stride) P(parents) I(parents_stride) P(depths) I(depths_stride) P(slots) P(trees) I(table) \
    P(proposals) I(requests) I(nodes)
SGL_ARGS(TreePlaceArgs, SGL_TREE_PLACE_ARGS)
#define SGL_TREE_WALK_ARGS(P, I, D)                                                                           \
    P(drawn) P(owners) P(slots) P(limits) P(trees) I(table) I(most) P(last) P(lengths) P(proposals) I(proposals_stride) \
    P(path) P(runs) I(requests) I(width) I(steps)
SGL_ARGS(TreeWalkArgs, SGL_TREE_WALK_ARGS)

// The k largest of softmax(logits), largest first, of equal ones the first; weights of `type`, ids i64.
#define SGL_ROUTING_ARGS(P, I, D) P(logits) I(stride) P(weights) P(ids) I(tokens) I(experts) I(k) I(normalize) I(type)
SGL_ARGS(RoutingArgs, SGL_ROUTING_ARGS)

// The same of scores + bias f32, scores being sigmoid(logits) for kind 0 and sqrt(softplus(logits)) for 1, in the top_groups of
// `groups` of neighbours whose two largest have the largest sums. Weights are scores, over their sum + eps if `normalize`,
// times scale.
#define SGL_SCORED_ROUTING_ARGS(P, I, D) \
    SGL_ROUTING_ARGS(P, I, D) P(bias) I(kind) I(groups) I(top_groups) D(eps) D(scale)
SGL_ARGS(ScoredRoutingArgs, SGL_SCORED_ROUTING_ARGS)

// The same weights of the experts chosen[ids[t]] [k] i32.
#define SGL_HASH_ROUTING_ARGS(P, I, D) \
    SGL_ROUTING_ARGS(P, I, D) P(input_ids) I(input_bytes) P(chosen) D(eps) D(scale)
SGL_ARGS(HashRoutingArgs, SGL_HASH_ROUTING_ARGS)

// out[t] = the sum over k of weights[t, k] * (w2[e] activation(w13[e] hidden[t] + b13[e]) + b2[e]), e = ids[t, k], none where
// that is -1. Form 0: silu_and_mul, gates at most `limit`, and what they open within it. Form 1: gates and what they open
// take turns, and are held and bent as the table's `clamped_moe` says. Form 2: max(x, 0)^2. Biases may be null but for form 1.
// w13 [experts, 2 * inner (form 2: inner), hidden_size], w2 [experts, hidden_size, inner], weights and ids [tokens, choices],
// contiguous.
#define SGL_MOE_ARGS(P, I, D)                                                                                   \
    P(hidden) I(hidden_stride) P(weights) P(ids) I(ids_bytes) P(w13) P(b13) P(w2) P(b2) P(out) I(tokens) I(choices) \
    I(experts) I(hidden_size) I(inner) I(type) I(form) D(alpha) D(limit)
SGL_ARGS(MoeArgs, SGL_MOE_ARGS)

namespace sgl::SGL_ISA {

void rms_norm(const RmsNormArgs& args, Pool& pool);
void add_rms_norm(const AddRmsNormArgs& args, Pool& pool);
void layer_norm(const LayerNormArgs& args, Pool& pool);
void silu_and_mul(const ActivationArgs& args, Pool& pool);
void limited_silu_and_mul(const LimitedActivationArgs& args, Pool& pool);
void gelu_tanh_and_mul(const ActivationArgs& args, Pool& pool);
void gelu(const ActivationArgs& args, Pool& pool);
void rotate(const RotateArgs& args, Pool& pool);
void copy_rows(const CopyRowsArgs& args, Pool& pool);
void embedding(const EmbeddingArgs& args, Pool& pool);
void cache_locations(const CacheLocationsArgs& args, Pool& pool);
void place_proposals(const PlaceProposalsArgs& args, Pool& pool);
void accept_proposals(const AcceptProposalsArgs& args, Pool& pool);
void tree_expand(const TreeExpandArgs& args, Pool& pool);
void tree_build(const TreeBuildArgs& args, Pool& pool);
void tree_place(const TreePlaceArgs& args, Pool& pool);
void tree_walk(const TreeWalkArgs& args, Pool& pool);
void top_k_routing(const RoutingArgs& args, Pool& pool);
void scored_routing(const ScoredRoutingArgs& args, Pool& pool);
void hash_routing(const HashRoutingArgs& args, Pool& pool);
void moe(const MoeArgs& args, Pool& pool);

}  // namespace sgl::SGL_ISA
