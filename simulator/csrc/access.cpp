// The access checker: byte ranges of every operation, ordered by the clocks, and the text of a race.
#include "sim.h"

#include <algorithm>
#include <cstring>

namespace sim {

namespace {
constexpr int64_t MAX_PIECES = 256;   // strided views split into at most so many ranges
constexpr int64_t MAX_ROWS = 65536;   // row-precise index operations above this count as whole
}  // namespace

bool AccessMap::clashes(Range range, bool write, int actor, const Clock& clock, Clash* clash) const {
  auto it = segments_.upper_bound(range.lo);
  if (it != segments_.begin()) --it;
  for (; it != segments_.end() && it->first < range.hi; ++it) {
    const Segment& segment = it->second;
    if (segment.hi <= range.lo) continue;
    auto hit = [&](const Use& use, bool writes) {
      if (use.actor < 0 || use.actor == actor || knows(clock, use.actor, use.epoch)) return false;
      *clash = {use, writes, std::max(range.lo, it->first), std::min(range.hi, segment.hi)};
      return true;
    };
    if (hit(segment.write, true)) return true;
    if (!write) continue;
    for (const Use& read : segment.reads)
      if (hit(read, false)) return true;
  }
  return false;
}

std::map<uint64_t, Segment>::iterator AccessMap::split(uint64_t at) {
  auto it = segments_.lower_bound(at);
  if (it != segments_.end() && it->first == at) return it;
  if (it == segments_.begin()) return it;
  auto before = std::prev(it);
  if (before->second.hi <= at) return it;
  Segment tail = before->second;
  before->second.hi = at;
  return segments_.emplace_hint(it, at, std::move(tail));
}

void AccessMap::record(Range range, bool write, const Use& use) {
  if (range.lo >= range.hi) return;
  auto it = split(range.lo);
  split(range.hi);
  if (write) {
    while (it != segments_.end() && it->first < range.hi) it = segments_.erase(it);
    segments_.emplace_hint(it, range.lo, Segment{range.hi, use, {}});
    return;
  }
  uint64_t at = range.lo;
  while (at < range.hi) {
    if (it == segments_.end() || it->first > at) {
      uint64_t until = it == segments_.end() ? range.hi : std::min(range.hi, it->first);
      it = segments_.emplace_hint(it, at, Segment{until, Use{}, {}});
    }
    auto& reads = it->second.reads;
    auto same = std::find_if(reads.begin(), reads.end(), [&](const Use& read) { return read.actor == use.actor; });
    if (same == reads.end()) {
      reads.push_back(use);
    } else {
      *same = use;
    }
    at = it->second.hi;
    ++it;
  }
}

void AccessMap::forget_known(const Clock& floor) {
  for (auto it = segments_.begin(); it != segments_.end();) {
    Segment& segment = it->second;
    if (segment.write.actor >= 0 && knows(floor, segment.write.actor, segment.write.epoch)) segment.write = Use{};
    auto& reads = segment.reads;
    reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const Use& use) { return knows(floor, use.actor, use.epoch); }), reads.end());
    it = segment.write.actor < 0 && reads.empty() ? segments_.erase(it) : std::next(it);
  }
}

// ---- which bytes ----

namespace {
uint64_t offset_in(const at::Tensor& tensor, const Block& block) {
  return static_cast<const uint8_t*>(tensor.storage().data()) - block.chunk->base + tensor.storage_offset() * tensor.itemsize();
}

// The inner dimensions that are one run of bytes, and the sizes and strides of the rest.
struct Layout {
  int64_t run;
  std::vector<int64_t> sizes, strides;
  int64_t pieces = 1;
  int64_t span;
};

Layout layout_of(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) > 0) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  Layout layout;
  int64_t run = 1, last = 0;
  for (auto [stride, size] : dims) {
    last += stride * (size - 1);
    if (layout.sizes.empty() && stride <= run) {
      run += stride * (size - 1);
    } else {
      layout.sizes.push_back(size);
      layout.strides.push_back(stride);
      layout.pieces *= size;
    }
  }
  layout.run = run;
  layout.span = last + 1;
  return layout;
}
}  // namespace

std::vector<Range> ranges_of(const at::Tensor& tensor, const Block& block) {
  if (tensor.numel() == 0) return {};
  uint64_t item = tensor.itemsize(), start = offset_in(tensor, block);
  if (tensor.is_contiguous()) return {{start, start + tensor.numel() * item}};
  Layout layout = layout_of(tensor);
  if (layout.pieces > MAX_PIECES) return {{start, start + layout.span * item}};
  std::vector<Range> ranges;
  for (int64_t piece = 0; piece < layout.pieces; ++piece) {
    int64_t rest = piece, at = 0;
    for (size_t d = 0; d < layout.sizes.size(); ++d) {
      at += rest % layout.sizes[d] * layout.strides[d];
      rest /= layout.sizes[d];
    }
    ranges.push_back({start + at * item, start + (at + layout.run) * item});
  }
  return ranges;
}

std::vector<Range> rows_of(const at::Tensor& tensor, const at::Tensor& rows, const Block& block) {
  if (tensor.dim() == 0 || rows.numel() == 0 || tensor.numel() == 0) return rows.numel() == 0 ? std::vector<Range>{} : ranges_of(tensor, block);
  if (rows.numel() > MAX_ROWS) return ranges_of(tensor, block);
  at::Tensor flat = rows.reshape(-1).to(at::kLong);
  std::vector<int64_t> wanted(flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel());
  for (int64_t& row : wanted)
    if (row < 0) row += tensor.size(0);
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::vector<Range> one = ranges_of(tensor.select(0, 0), block);
  if (static_cast<int64_t>(one.size() * wanted.size()) > MAX_ROWS) return ranges_of(tensor, block);
  uint64_t stride = tensor.stride(0) * tensor.itemsize();
  std::vector<Range> ranges;
  for (int64_t row : wanted) {
    if (row < 0 || row >= tensor.size(0)) continue;
    for (Range range : one) {
      Range moved{range.lo + row * stride, range.hi + row * stride};
      if (!ranges.empty() && ranges.back().hi == moved.lo) {
        ranges.back().hi = moved.hi;
      } else {
        ranges.push_back(moved);
      }
    }
  }
  return ranges;
}

std::string text_of(Range range, const Block& block) {
  return "bytes [" + std::to_string(range.lo) + ", " + std::to_string(range.hi) + ") of " + describe_block(block);
}

// ---- checking and recording ----

void check_alive(const Block& block, int op, int site) {
  if (block.freed)
    violate("use_after_free", name_of(op) + " at " + name_of(site) + " uses " + describe_block(block) + ", freed near " + name_of(block.freed_site) + ".");
}

namespace {
void check_pool_content(const Access& access, int op, int site) {
  const Block& block = *access.block;
  if (!block.graph || access.write) return;
  if (block.chunk->replayed_by == block.graph) return;
  std::string what = name_of(op) + " at " + name_of(site) + " reads " + describe_block(block) + ", memory of a captured graph";
  if (block.chunk->replayed_by == 0) {  // eager work between captures may run on garbage, as on hardware
    if (access.to_host) violate("uninitialised", what + " that was never replayed: a capture computes nothing.");
    return;
  }
  violate("pool_mate", what + ", after another graph of the same pool was replayed and wrote over it. Copy the output out before the next replay.");
}

void report_race(const Access& access, const Clash& clash, int actor, int op, int site) {
  std::string verb = access.write ? " writes " : " reads ";
  violate("race", name_of(op) + " on " + actor_name(actor) + " at " + name_of(site) + verb + text_of({clash.lo, clash.hi}, *access.block) +
                      ", with no ordering after " + name_of(clash.other.op) + ", which " + (clash.other_writes ? "writes" : "reads") + " them on " +
                      actor_name(clash.other.actor) + " at " + name_of(clash.other.site) + ". Missing: " + actor_name(actor) +
                      " must wait for an event recorded on " + actor_name(clash.other.actor) + " after that operation.");
}
}  // namespace

void touch(const std::vector<Access>& accesses, int actor, int op, int site) {
  raise_late();
  tick(actor);
  touch_more(accesses, actor, op, site);
}

void touch_more(const std::vector<Access>& accesses, int actor, int op, int site, const Pool* replayed) {
  State& s = state();
  Capture* capture = capturing(actor);
  const Clock& clock = clock_of(actor);
  uint64_t epoch = clock.at(actor);
  for (const Access& access : accesses) {
    // What a graph's own pool has freed is there again whenever the graph runs.
    if (!replayed || access.block->chunk->pool != replayed) check_alive(*access.block, op, site);
    if (!capture) check_pool_content(access, op, site);
    Chunk* chunk = access.block->chunk.get();
    const AccessMap& map = capture ? capture->maps[chunk] : chunk->map;
    Clash clash;
    for (Range range : access.ranges)
      if (map.clashes(range, access.write, actor, clock, &clash)) report_race(access, clash, actor, op, site);
  }
  for (const Access& access : accesses) {
    Chunk* chunk = access.block->chunk.get();
    AccessMap& map = capture ? capture->maps[chunk] : chunk->map;
    for (Range range : access.ranges) map.record(range, access.write, Use{actor, epoch, op, site});
    if (capture) {
      if (!access.by_rows)
        for (Range range : access.ranges) capture->fixed[chunk].record(range, access.write, Use{actor, epoch, op, site});
      capture->blocks[access.block->id] = access.block;
    } else {
      if (access.write && access.block->graph) chunk->replayed_by = access.block->graph;
      if (map.size() > chunk->trim_at) {
        map.forget_known(s.host);
        chunk->trim_at = std::max<uint64_t>(64, 2 * map.size());
      }
    }
  }
}

void save_for_undo(Capture& capture, const std::vector<Access>& accesses) {
  for (const Access& access : accesses) {
    if (!access.write || access.block->pinned || access.block->graph == capture.id) continue;
    for (Range range : access.ranges) {
      uint8_t* at = access.block->chunk->base + range.lo;
      capture.undo.push_back({at, std::vector<uint8_t>(at, at + (range.hi - range.lo)), access.block});
    }
  }
}

}  // namespace sim
