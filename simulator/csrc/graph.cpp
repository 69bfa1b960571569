// Graph capture and replay: operations recorded with their bytes, checked against the world when they run again.
#include "sim.h"

#include <cstring>

namespace sim {

void abandon(Capture& capture) {
  State& s = state();
  for (int actor : capture.actors) {
    s.streams[actor].capture = nullptr;
    s.streams[actor].captured.clear();
  }
  for (auto it = capture.undo.rbegin(); it != capture.undo.rend(); ++it) std::memcpy(it->at, it->bytes.data(), it->bytes.size());
  for (auto& [id, block] : capture.blocks)
    if (block->graph == capture.id) poison(block->chunk->base, block->chunk->size);
  uint64_t id = capture.id;
  s.captures.erase(id);
}

namespace {

std::string unjoined(const Capture& capture) {
  State& s = state();
  const Clock& origin = s.streams[capture.origin].captured;
  for (int actor : capture.actors) {
    const Clock& clock = s.streams[actor].captured;
    if (static_cast<size_t>(actor) < clock.size() && !knows(origin, actor, clock[actor])) return actor_name(actor);
  }
  return "";
}

}  // namespace

Graph::~Graph() { reset(); }

Capture* Graph::open() const {
  auto found = state().captures.find(id_);
  return id_ && !ready_ && found != state().captures.end() ? found->second.get() : nullptr;
}

void Graph::begin(std::pair<uint64_t, uint64_t> pool) {
  int site = site_here();
  State& s = state();
  Lock lock(s.mutex);
  TORCH_CHECK(!ready_ && !open(), "this graph already holds a capture; reset it first");
  int device = current_device(), actor = current_actor(device);
  if (actor <= static_cast<int>(s.devices.size()))
    violate("wrong_capture", "a capture begins at " + name_of(site) + " on " + actor_name(actor) + ", which cannot be captured. Make a stream current first.");
  for (auto& [id, other] : s.captures)
    if (other->device == device)
      violate("wrong_capture", "a capture begins at " + name_of(site) + " while " + actor_name(other->origin) + " is already being captured.");
  TORCH_CHECK(!s.pools_ended.count(pool), "the last graph of this pool is gone, and the pool with it: a capture needs a new one");
  auto capture = std::make_unique<Capture>();
  capture->id = id_ = ++s.captures_made;
  capture->device = device_ = device;
  capture->origin = actor;
  capture->thread = std::this_thread::get_id();
  capture->pool = pool_ = make_pool(pool);
  capture->actors = {actor};
  pool_id_ = pool_->id;
  ++pool_->graphs;
  s.streams[actor].capture = capture.get();
  s.streams[actor].captured.clear();
  s.captures[id_] = std::move(capture);
}

void Graph::end() {
  int site = site_here();
  State& s = state();
  std::vector<Node> dropped;
  Lock lock(s.mutex);
  TORCH_CHECK(open(), "no capture is under way in this graph");
  Capture& capture = *open();
  bool elsewhere = current_actor(device_) != capture.origin;
  std::string loose = unjoined(capture);
  std::string origin = actor_name(capture.origin);
  std::optional<Violation> broken = capture.broken;
  bool empty = capture.nodes.empty();
  (broken || elsewhere || !loose.empty() || empty ? dropped : nodes_) = std::move(capture.nodes);
  for (auto& [id, block] : capture.blocks) {
    auto map = capture.fixed.find(block->chunk.get());
    if (map == capture.fixed.end()) continue;
    summary_.emplace_back(block->chunk, std::move(map->second));
    capture.fixed.erase(map);
  }
  abandon(capture);
  if (broken) throw *broken;
  if (elsewhere) violate("wrong_capture", "the capture ends at " + name_of(site) + " on another stream than " + origin + ", where it began.");
  if (!loose.empty())
    violate("wrong_capture", "the capture ends at " + name_of(site) + " while " + loose + " was forked from it and never joined back: let " + origin +
                                 " wait for an event recorded on it.");
  if (empty) violate("wrong_capture", "the capture ended at " + name_of(site) + " is empty: no work was queued on " + origin + ". Was another stream current?");
  ready_ = true;
  count("captures");
}

// The whole graph is one piece of work on the replaying stream; checked before anything runs.
void Graph::verify(int actor, int site) {
  State& s = state();
  for (const Node& node : nodes_)
    for (const Access& access : node.accesses) {
      const Block& block = *access.block;
      if (block.freed && block.chunk->pool != pool_)
        violate("stale_graph", "the replay at " + name_of(site) + " runs " + name_of(node.op) + " captured at " + name_of(node.site) + " on " +
                                   describe_block(block) + ", which was freed near " + name_of(block.freed_site) +
                                   ". A graph keeps addresses, not tensors: keep its inputs alive and refill them in place.");
      if (!access.write && block.graph && block.graph != id_ && block.chunk->replayed_by && block.chunk->replayed_by != block.graph)
        violate("pool_mate", "the replay at " + name_of(site) + " runs " + name_of(node.op) + " captured at " + name_of(node.site) + " on " +
                                 describe_block(block) + ", the output of another graph that a third one has overwritten.");
    }
  tick(actor);
  const Clock& clock = clock_of(actor);
  int op = name_id("graph replay");
  for (auto& [chunk, map] : summary_)
    for (auto& [lo, segment] : map.segments()) {
      Clash clash;
      bool write = segment.write.actor >= 0;
      if (!chunk->map.clashes({lo, segment.hi}, write, actor, clock, &clash)) continue;
      const Use& own = write ? segment.write : segment.reads.front();
      violate("race", "the replay on " + actor_name(actor) + " at " + name_of(site) + " runs " + name_of(own.op) + " captured at " + name_of(own.site) +
                          ", which " + (write ? "writes" : "reads") + " bytes [" + std::to_string(clash.lo) + ", " + std::to_string(clash.hi) +
                          ") with no ordering after " + name_of(clash.other.op) + ", which " + (clash.other_writes ? "writes" : "reads") + " them on " +
                          actor_name(clash.other.actor) + " at " + name_of(clash.other.site) + ". Missing: " + actor_name(actor) +
                          " must wait for an event recorded after that operation before the replay.");
    }
  for (auto& [chunk, map] : summary_)
    for (auto& [lo, segment] : map.segments()) {
      Use use{actor, clock[actor], op, site};
      if (segment.write.actor >= 0) chunk->map.record({lo, segment.hi}, true, use);
      if (!segment.reads.empty()) chunk->map.record({lo, segment.hi}, false, use);
    }
  // What a graph updates in place is still the output of the graph that made it.
  for (const Node& node : nodes_)
    for (const Access& access : node.accesses) {
      Chunk& chunk = *access.block->chunk;
      if (access.write && chunk.pool == pool_) chunk.replayed_by = access.block->graph;
    }
  (void)s;
}

void Graph::replay() {
  int site = site_here();
  int actor;
  {
    Lock lock(state().mutex);
    TORCH_CHECK(ready_, "this graph holds no capture");
    actor = current_actor(device_);
    if (capturing(actor)) violate("wrong_capture", "a replay at " + name_of(site) + " inside a capture is not simulated.");
    verify(actor, site);
    count("replays");
  }
  for (const Node& node : nodes_) {
    if (node.dynamic) {
      std::vector<Access> rows = node.dynamic();
      Lock lock(state().mutex);
      touch_more(rows, actor, node.op, node.site, pool_);
    }
    if (node.run) node.run(actor);
  }
}

void Graph::reset() {
  std::vector<Node> dropped;
  Lock lock(state().mutex);
  if (Capture* capture = open()) {
    dropped = std::move(capture->nodes);
    abandon(*capture);
  }
  for (Node& node : nodes_) dropped.push_back(std::move(node));
  nodes_.clear();
  summary_.clear();
  ready_ = false;
  if (!pool_) return;
  if (!--pool_->graphs) state().pools_ended.insert(pool_id_);
  drop_pool(pool_);
  pool_ = nullptr;
}

std::string Graph::describe() const {
  std::string text;
  for (const Node& node : nodes_) text += name_of(node.op) + " at " + name_of(node.site) + "\n";
  return text;
}

}  // namespace sim
