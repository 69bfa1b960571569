// Device memory with a capacity and poison, graph pools, pinned host memory and the copies in flight to and from it.
#include "sim.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace sim {

namespace {

constexpr uint64_t LAZY = 32u << 20;  // larger chunks are mapped, their poison appears page by page
constexpr uint64_t TILE = 8u << 20;

void free_handle(void* context);
void free_pinned(void* context);

uint64_t rounded(uint64_t size) { return (std::max<uint64_t>(size, 1) + GRANULE - 1) / GRANULE * GRANULE; }

// One poisoned tile in a memory file, mapped privately as often as needed: untouched pages cost nothing.
int poison_file() {
  static int file = [] {
    int made = memfd_create("sglcore-sim-poison", 0);
    std::vector<uint8_t> tile(TILE);
    poison(tile.data(), TILE);
    TORCH_CHECK(made >= 0 && write(made, tile.data(), TILE) == static_cast<ssize_t>(TILE), "cannot make the poison tile");
    return made;
  }();
  return file;
}

uint8_t* map_bytes(uint64_t size) {
  if (size < LAZY) {
    void* at = nullptr;
    TORCH_CHECK(posix_memalign(&at, 512, rounded(size)) == 0, "the host is out of memory");
    poison(static_cast<uint8_t*>(at), rounded(size));
    return static_cast<uint8_t*>(at);
  }
  uint64_t whole = (size + TILE - 1) / TILE * TILE;
  auto* at = static_cast<uint8_t*>(mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  TORCH_CHECK(at != MAP_FAILED, "the host is out of address space");
  for (uint64_t done = 0; done < whole; done += TILE)
    TORCH_CHECK(mmap(at + done, TILE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, poison_file(), 0) != MAP_FAILED,
                "the host is out of mappings");
  return at;
}

std::shared_ptr<Chunk> make_chunk(uint64_t size, int device) {
  auto chunk = std::make_shared<Chunk>();
  chunk->size = size;
  chunk->device = device;
  chunk->base = map_bytes(size);
  return chunk;
}

}  // namespace

Chunk::~Chunk() {
  if (!base) return;
  if (size < LAZY) {
    std::free(base);
  } else {
    munmap(base, (size + TILE - 1) / TILE * TILE);
  }
}

void poison(uint8_t* at, uint64_t size) {
  for (uint64_t i = 0; i + 1 < size; i += 2) {
    at[i] = 0xFF;
    at[i + 1] = 0x7F;
  }
  if (size % 2) at[size - 1] = 0xFF;
}

bool is_poison(const uint8_t* at, uint64_t size) {
  for (uint64_t i = 0; i < size; ++i)
    if (at[i] != (i % 2 ? 0x7F : 0xFF)) return false;
  return true;
}

std::string describe_block(const Block& block) {
  std::string where = block.pinned ? "pinned host memory" : c10::Device(state().type, static_cast<c10::DeviceIndex>(block.device)).str();
  return "block " + std::to_string(block.id) + " (" + std::to_string(block.size) + " bytes of " + where + ", allocated at " + name_of(block.site) + ")";
}

BlockRef block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_handle || !data.get_context()) return nullptr;
  return *static_cast<BlockRef*>(data.get_context());
}

BlockRef block_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? block_of(tensor.storage().data_ptr()) : nullptr;
}

BlockRef pinned_block(const void* data) {
  State& s = state();
  auto* at = const_cast<uint8_t*>(static_cast<const uint8_t*>(data));
  auto it = s.pinned.upper_bound(at);
  if (it == s.pinned.begin()) return nullptr;
  --it;
  return at < it->first + std::max<uint64_t>(it->second->size, 1) ? it->second : nullptr;
}

// ---- the device allocator ----

namespace {

uint64_t held_back(int device) {
  uint64_t held = 0;
  for (const Limbo& entry : state().limbo)
    if (entry.retained && entry.block->device == device) held += entry.block->charge;
  for (auto& [id, pool] : state().pools)
    for (Chunk* chunk : pool->idle)
      if (chunk->device == device) held += rounded(chunk->size);
  return held;
}

// The caching allocator's rule: freed memory serves its own stream again at once, unless record_stream was called.
void leave_limbo(int actor, uint64_t charge, int site) {
  State& s = state();
  Clock& clock = s.streams.at(actor).clock;
  join(clock, s.host);
  for (size_t i = 0; i < s.limbo.size();) {
    Limbo& entry = s.limbo[i];
    bool over = knows(entry.retained ? s.host : s.streams.at(entry.block->actor).clock, entry.use.actor, entry.use.epoch);
    if (!over && !entry.retained && entry.block->actor == actor && charge <= entry.block->charge) {
      Limbo found = entry;
      s.limbo.erase(s.limbo.begin() + static_cast<long>(i));
      violate("use_after_free", "an allocation on " + actor_name(actor) + " at " + name_of(site) + " takes the memory of " + describe_block(*found.block) +
                                    ", freed while " + name_of(found.use.op) + " on " + actor_name(found.use.actor) + " at " + name_of(found.use.site) +
                                    (found.write ? " writes" : " reads") + " it. Missing: record_stream on the tensor, or a wait of " +
                                    actor_name(actor) + " for that stream before the tensor is dropped.");
    }
    if (over) {
      s.limbo.erase(s.limbo.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
}

void charge_device(int device, uint64_t charge) {
  Device& d = state().devices.at(device);
  if (d.allocated + held_back(device) + charge > d.capacity) {
    auto& limbo = state().limbo;
    for (size_t i = 0; i < limbo.size();) limbo[i].retained ? (void)limbo.erase(limbo.begin() + static_cast<long>(i)) : (void)++i;
  }
  uint64_t held = held_back(device);
  if (d.allocated + held + charge > d.capacity) {
    ++d.ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device ", device, " is out of memory: tried to allocate ", charge, " bytes; ", d.allocated,
                     " are allocated and ", held, " held of ", d.capacity);
  }
  d.allocated += charge;
  d.peak = std::max(d.peak, d.allocated);
  d.reserved = std::max(d.reserved, d.allocated + held);
  d.reserved_peak = std::max(d.reserved_peak, d.reserved);
  ++d.count;
}

std::shared_ptr<Chunk> pool_chunk(Pool& pool, uint64_t size, int device) {
  Chunk* best = nullptr;
  for (Chunk* chunk : pool.idle)
    if (chunk->device == device && chunk->size >= size && chunk->size <= 2 * size + 4096 && (!best || chunk->size < best->size)) best = chunk;
  if (best) {
    pool.idle.erase(best);
    for (auto& chunk : pool.chunks)
      if (chunk.get() == best) return chunk;
  }
  auto made = make_chunk(size, device);
  made->pool = &pool;
  pool.chunks.push_back(made);
  return made;
}

void keep_in_limbo(const BlockRef& block) {
  State& s = state();
  std::map<int, Limbo> latest;
  auto note = [&](const Use& use, bool write) {
    if (use.actor < 0 || use.actor == block->actor || knows(s.host, use.actor, use.epoch)) return;
    Limbo& entry = latest[use.actor];
    if (!entry.block || entry.use.epoch < use.epoch) entry = {block, use, write, block->retained.count(use.actor) > 0};
  };
  for (auto& [lo, segment] : block->chunk->map.segments()) {
    note(segment.write, true);
    for (const Use& read : segment.reads) note(read, false);
  }
  for (auto& [actor, entry] : latest) s.limbo.push_back(entry);
}

thread_local int last_site = 0;

void free_block(const BlockRef& block) {
  State& s = state();
  block->freed = true;
  block->freed_site = last_site;
  s.devices.at(block->device).allocated -= block->charge;
  if (Pool* pool = block->chunk->pool) {
    pool->idle.insert(block->chunk.get());
    if (!pool->graphs && s.captures.empty()) drop_pool(pool);
    return;
  }
  keep_in_limbo(block);
  if (block.use_count() > 2 && block->size < LAZY) poison(block->chunk->base, block->size);
}

void free_handle(void* context) {
  auto* handle = static_cast<BlockRef*>(context);
  {
    Lock lock(state().mutex);
    free_block(*handle);
    handle->reset();
  }
  delete handle;
}

BlockRef make_block(uint64_t size, int device, int site) {
  State& s = state();
  auto block = std::make_shared<Block>();
  block->id = ++s.blocks_made;
  block->size = size;
  block->charge = rounded(size);
  block->device = device;
  block->site = site;
  return block;
}

}  // namespace

c10::DataPtr allocate(uint64_t size, int device) {
  c10::Device where(state().type, static_cast<c10::DeviceIndex>(device));
  if (size == 0) return c10::DataPtr(nullptr, where);
  int site = last_site = site_here();
  Lock lock(state().mutex);
  int actor = current_actor(device);
  BlockRef block = make_block(size, device, site);
  block->actor = actor;
  Capture* capture = capturing(actor);
  if (!capture) leave_limbo(actor, block->charge, site);
  charge_device(device, block->charge);
  if (capture) {
    block->graph = capture->id;
    block->chunk = pool_chunk(*capture->pool, size, device);
    block->chunk->replayed_by = 0;
    capture->blocks[block->id] = block;
  } else {
    block->chunk = make_chunk(size, device);
  }
  void* base = block->chunk->base;
  return c10::DataPtr(base, new BlockRef(std::move(block)), &free_handle, where);
}

void retain(const c10::DataPtr& data, int actor) {
  Lock lock(state().mutex);
  if (BlockRef block = block_of(data)) block->retained.insert(actor);
}

void empty_cache(int device) {
  Lock lock(state().mutex);
  Device& d = state().devices.at(device);
  d.reserved = d.allocated + held_back(device);
}

void reset_peak(int device) {
  Lock lock(state().mutex);
  Device& d = state().devices.at(device);
  d.peak = d.allocated;
  d.reserved_peak = d.reserved;
}

Pool* make_pool(std::pair<uint64_t, uint64_t> id) {
  State& s = state();
  if (id.first == 0 && id.second == 0) id.first = ++s.pools_made;
  auto& pool = s.pools[id];
  if (!pool) {
    pool = std::make_unique<Pool>();
    pool->id = id;
  }
  return pool.get();
}

// Gives the idle memory of a pool that no graph uses back; the pool goes with its last live block.
void drop_pool(Pool* pool) {
  if (pool->graphs > 0) return;
  auto& chunks = pool->chunks;
  for (size_t i = 0; i < chunks.size();) {
    if (pool->idle.erase(chunks[i].get())) {
      chunks.erase(chunks.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
  if (chunks.empty()) state().pools.erase(pool->id);
}

namespace {
struct DeviceMemory final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    return guarded([&] { return sim::allocate(size, current_device()); });
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (size_t d = 0; d < state().devices.size(); ++d) empty_cache(static_cast<int>(d));
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { retain(data, actor_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    const Device& d = state().devices.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](c10::CachingAllocator::StatArray& array, uint64_t current, uint64_t peak) {
      array[0].current = static_cast<int64_t>(current);
      array[0].peak = static_cast<int64_t>(peak);
    };
    fill(stats.allocated_bytes, d.allocated, d.peak);
    fill(stats.active_bytes, d.allocated, d.peak);
    fill(stats.requested_bytes, d.allocated, d.peak);
    fill(stats.reserved_bytes, d.reserved, d.reserved_peak);
    stats.allocation[0].allocated = static_cast<int64_t>(d.count);
    stats.num_ooms = static_cast<int64_t>(d.ooms);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    const Device& d = state().devices.at(device);
    return {d.capacity - d.reserved, d.capacity};
  }
};

// ---- pinned memory ----

struct PinnedMemory final : public at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return c10::DataPtr(nullptr, c10::DeviceType::CPU);
    int site = last_site = site_here();
    Lock lock(state().mutex);
    BlockRef block = make_block(size, 0, site);
    block->pinned = true;
    block->chunk = make_chunk(size, 0);
    uint8_t* base = block->chunk->base;
    state().pinned[base] = block;
    return c10::DataPtr(base, base, &free_pinned, c10::DeviceType::CPU);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* ptr, void*, c10::Stream) override {
    Lock lock(state().mutex);
    return pinned_block(ptr) != nullptr;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// Memory may be freed in a destructor, so the fault waits for whoever can throw it.
void report_freed_under_work(const Block& block) {
  State& s = state();
  auto report = [&](const Use& use, bool writes) {
    if (s.late || use.actor < 0 || block.retained.count(use.actor) || knows(s.host, use.actor, use.epoch)) return;
    s.late = Violation{"pinned_freed", describe_block(block) + " was freed near " + name_of(last_site) + " while " + name_of(use.op) + " at " +
                                           name_of(use.site) + " on " + actor_name(use.actor) + " could still be " + (writes ? "writing" : "reading") +
                                           " it. Torch keeps pinned memory for its own copies alone: hold it until the host has waited for "
                                           "an event recorded after that work."};
  };
  for (auto& [lo, segment] : block.chunk->map.segments()) {
    report(segment.write, true);
    for (const Use& read : segment.reads) report(read, false);
  }
}

void free_pinned(void* context) {
  State& s = state();
  Lock lock(s.mutex);
  auto found = s.pinned.find(static_cast<uint8_t*>(context));
  BlockRef block = found->second;
  s.pinned.erase(found);
  report_freed_under_work(*block);
  block->freed = true;
  block->freed_site = last_site;
  auto& pending = s.pending;  // the pinned allocator keeps memory of a copy in flight by itself
  for (size_t i = 0; i < pending.size();)
    pending[i].pinned == block ? (void)pending.erase(pending.begin() + static_cast<long>(i)) : (void)++i;
}

bool overlap(const Pending& a, const Pending& b) {
  return a.host < b.host + b.bytes.size() && b.host < a.host + a.bytes.size();
}

std::string in_flight(const Pending& copy) {
  return "the copy at " + name_of(copy.site) + " on " + actor_name(copy.actor);
}

void finish(const Pending& copy) {
  if (copy.to_host) {
    if (!is_poison(copy.host, copy.bytes.size()))
      violate("pinned_written", "the host wrote to " + describe_block(*copy.pinned) + " while " + in_flight(copy) +
                                    " was still to arrive there. Wait for an event recorded after the copy first.");
    std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    for (const Pending& other : state().pending)
      if (other.to_host && overlap(copy, other)) poison(other.host, other.bytes.size());
  } else if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0) {
    violate("pinned_source_changed", "the host changed " + describe_block(*copy.pinned) + " while " + in_flight(copy) +
                                         " could still be reading it. Wait for an event recorded after the copy before you refill the buffer, or use another one.");
  }
}
}  // namespace

void raise_late() {
  if (!state().late) return;
  Violation found = std::move(*state().late);
  state().late.reset();
  violate(found.kind.c_str(), found.text);
}

void settle() {
  raise_late();
  State& s = state();
  for (size_t i = 0; i < s.pending.size();) {
    if (!knows(s.host, s.pending[i].actor, s.pending[i].epoch)) {
      ++i;
      continue;
    }
    Pending copy = std::move(s.pending[i]);
    s.pending.erase(s.pending.begin() + static_cast<long>(i));
    finish(copy);
  }
}

void queue_to_host(const BlockRef& pinned, uint8_t* host, std::vector<uint8_t> bytes, int actor, uint64_t epoch, int op, int site) {
  auto& pending = state().pending;  // an earlier read of these bytes can be compared no later than now
  for (size_t i = 0; i < pending.size();) {
    Pending& other = pending[i];
    if (other.to_host || other.host >= host + bytes.size() || host >= other.host + other.bytes.size()) {
      ++i;
      continue;
    }
    Pending copy = std::move(other);
    pending.erase(pending.begin() + static_cast<long>(i));
    finish(copy);
  }
  poison(host, bytes.size());
  state().pending.push_back({pinned, actor, epoch, true, host, std::move(bytes), op, site});
}

void queue_from_host(const BlockRef& pinned, uint8_t* host, uint64_t size, int actor, uint64_t epoch, int op, int site) {
  state().pending.push_back({pinned, actor, epoch, false, host, std::vector<uint8_t>(host, host + size), op, site});
}

// A device reading pinned memory sees what earlier device work put there, even where the host does not yet.
void overlay_pending(uint8_t* at, const uint8_t* host, uint64_t size, const Clock& clock, int op, int site) {
  for (const Pending& copy : state().pending) {
    if (!copy.to_host || host >= copy.host + copy.bytes.size() || copy.host >= host + size) continue;
    if (!knows(clock, copy.actor, copy.epoch))
      violate("race", name_of(op) + " at " + name_of(site) + " reads " + describe_block(*copy.pinned) + " with no ordering after " + in_flight(copy) + ".");
    const uint8_t* lo = std::max<const uint8_t*>(host, copy.host);
    const uint8_t* hi = std::min<const uint8_t*>(host + size, copy.host + copy.bytes.size());
    std::memcpy(at + (lo - host), copy.bytes.data() + (lo - copy.host), hi - lo);
  }
}

void require_landed(const at::Tensor& tensor) {
  if (untracked_depth() > 0 || !tensor.device().is_cpu() || !tensor.has_storage() || tensor.numel() == 0) return;
  {
    Lock lock(state().mutex);
    if (state().pending.empty()) return;
  }
  int site = site_here();
  Lock lock(state().mutex);
  auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  for (const Pending& copy : state().pending)
    if (copy.to_host && data < copy.host + copy.bytes.size() && copy.host < data + tensor.nbytes())
      violate("pinned_read_early", "the host reads " + describe_block(*copy.pinned) + " at " + name_of(site) + " before it waited for " +
                                       in_flight(copy) + ". Wait for an event recorded after the copy first.");
}

void register_memory() {
  c10::SetAllocator(state().type, new DeviceMemory(), 255);
  at::setHostAllocator(state().type, new PinnedMemory(), 255);
}

}  // namespace sim
