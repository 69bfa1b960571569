// The simulated accelerator: shared declarations.
// One mutex guards all state. Nothing that may take the GIL or drop a tensor runs while it is held.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch {
class Library;
}

namespace sim {

using Clock = std::vector<uint64_t>;  // one entry per actor: 0 is the host, 1.. the default streams, then the others

constexpr int HOST = 0;
constexpr int POLLS = 2;  // queries answered False before unfinished work is reported complete
constexpr uint64_t GRANULE = 512;

// A contract violation. Thrown inside; leaves the library as sglcore_sim.Fault.
struct Violation {
  std::string kind;
  std::string text;
};
[[noreturn]] void violate(const char* kind, const std::string& text);

// ---- accesses ----

struct Use {
  int actor = -1;
  uint64_t epoch = 0;
  int op = 0;
  int site = 0;
};

struct Range {
  uint64_t lo, hi;
};

struct Segment {
  uint64_t hi = 0;
  Use write;
  std::vector<Use> reads;
};

struct Clash {
  Use other;
  bool other_writes = false;
  uint64_t lo = 0, hi = 0;
};

// Who touched which bytes last: disjoint segments keyed by their first byte.
class AccessMap {
 public:
  bool clashes(Range range, bool write, int actor, const Clock& clock, Clash* clash) const;
  void record(Range range, bool write, const Use& use);
  void forget_known(const Clock& floor);
  const std::map<uint64_t, Segment>& segments() const { return segments_; }
  size_t size() const { return segments_.size(); }
  void clear() { segments_.clear(); }

 private:
  std::map<uint64_t, Segment>::iterator split(uint64_t at);
  std::map<uint64_t, Segment> segments_;
};

// ---- memory ----

struct Pool;

// Physical bytes. Several blocks of one graph pool may live in one chunk, one after the other.
struct Chunk {
  uint8_t* base = nullptr;
  uint64_t size = 0;
  int device = 0;
  Pool* pool = nullptr;
  AccessMap map;
  uint64_t replayed_by = 0;  // the graph that made what a replay wrote here last
  uint64_t trim_at = 64;
  ~Chunk();
};

struct Block {
  uint64_t id = 0;
  std::shared_ptr<Chunk> chunk;
  uint64_t size = 0;    // bytes asked for
  uint64_t charge = 0;  // bytes counted against the capacity
  int device = 0;
  int actor = 0;  // the stream that owns it
  int site = 0;
  int freed_site = 0;
  bool freed = false;
  uint64_t graph = 0;  // the capture that made it
  bool pinned = false;
  std::set<int> retained;  // record_stream
};
using BlockRef = std::shared_ptr<Block>;

struct Pool {
  std::pair<uint64_t, uint64_t> id;
  int graphs = 0;
  std::vector<std::shared_ptr<Chunk>> chunks;
  std::set<Chunk*> idle;
};

struct Device {
  uint64_t capacity = 0, allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, count = 0, ooms = 0;
};

struct Limbo {  // freed, but another stream's work on it is not ordered before the owner's next work
  BlockRef block;
  Use use;
  bool write = false;
  bool retained = false;
};

struct Pending {  // a copy in flight between a stream and pinned host memory
  BlockRef pinned;
  int actor = 0;
  uint64_t epoch = 0;
  bool to_host = false;
  uint8_t* host = nullptr;
  std::vector<uint8_t> bytes;
  int op = 0;
  int site = 0;
};

// ---- streams, events, graphs ----

struct Capture;

struct Stream {
  int device = 0;
  Clock clock;
  int polls = 0;
  uint64_t polled_epoch = 0;
  Capture* capture = nullptr;
  Clock captured;  // clock inside the capture
  double until = 0;  // when the work that `busy` gave it will be done, in milliseconds of the host's steady clock
  double share = 0.5;  // in virtual time: of the device, while other streams work; 0: it neither takes nor leaves anything
};

struct Event {
  bool recorded = false;
  int actor = 0;
  int device = 0;
  Clock clock;
  int polls = 0;
  uint64_t capture = 0;  // 0: recorded outside of any capture
  double milliseconds = 0;  // when its stream reaches it
};

struct Access {
  BlockRef block;
  std::vector<Range> ranges;  // relative to the chunk
  bool write = false;
  bool by_rows = false;  // the ranges depend on index values
  bool to_host = false;  // the bytes leave the device
};

struct Node {
  int op = 0;
  int site = 0;
  std::vector<Access> accesses;
  std::function<std::vector<Access>()> dynamic;  // accesses that depend on index values, asked before `run`
  std::function<void(int actor)> run;            // re-executes; may run any kernel and take the GIL
};

struct Undo {
  uint8_t* at;
  std::vector<uint8_t> bytes;
  BlockRef block;
};

struct Capture {
  uint64_t id = 0;
  int device = 0;
  int origin = 0;
  std::thread::id thread;
  Pool* pool = nullptr;
  std::set<int> actors;
  std::vector<Node> nodes;
  std::map<Chunk*, AccessMap> maps;   // everything: races between forked streams
  std::map<Chunk*, AccessMap> fixed;  // what every replay touches
  std::vector<Undo> undo;
  std::map<uint64_t, BlockRef> blocks;
  std::optional<Violation> broken;  // the first fault of the capturing thread: no graph comes out
};

class Graph {
 public:
  ~Graph();
  void begin(std::pair<uint64_t, uint64_t> pool);
  void end();
  void replay();
  void reset();
  std::pair<uint64_t, uint64_t> pool() const { return pool_id_; }
  size_t size() const { return nodes_.size(); }
  std::string describe() const;

 private:
  void verify(int actor, int site);
  Capture* open() const;  // the capture under way, or null
  std::pair<uint64_t, uint64_t> pool_id_{0, 0};
  Pool* pool_ = nullptr;
  uint64_t id_ = 0;
  int device_ = 0;
  bool ready_ = false;
  std::vector<Node> nodes_;
  std::vector<std::pair<std::shared_ptr<Chunk>, AccessMap>> summary_;
};

// ---- state ----

struct State {
  std::recursive_mutex mutex;
  c10::DeviceType type = c10::DeviceType::PrivateUse1;
  c10::DispatchKey key = c10::DispatchKey::PrivateUse1;
  bool installed = false;
  bool is_virtual = false;  // time passes where `pass`, `busy` and waits say so, and nowhere else
  double virtual_ms = 0;
  std::vector<Device> devices;
  std::vector<Stream> streams;  // index: actor; entry 0 is the host
  Clock host;
  uint64_t blocks_made = 0, pools_made = 0, captures_made = 0;
  std::vector<Limbo> limbo;
  std::map<uint8_t*, BlockRef> pinned;
  std::vector<Pending> pending;
  std::optional<Violation> late;  // found where nothing may be thrown: the next operation or wait does
  std::map<std::pair<uint64_t, uint64_t>, std::unique_ptr<Pool>> pools;
  std::set<std::pair<uint64_t, uint64_t>> pools_ended;  // whose last graph is gone: no other may be captured into them
  std::map<uint64_t, std::unique_ptr<Capture>> captures;
  std::map<uint64_t, bool> replayed;  // graph id: has it run
  std::map<std::string, int64_t> counters;
  std::vector<std::string> names{""};
  std::unordered_map<std::string, int> name_ids;
  std::map<std::string, std::vector<std::string>> extra_writes;
};
State& state();
using Lock = std::lock_guard<std::recursive_mutex>;

int name_id(const std::string& name);
std::string name_of(int id);
void count(const char* name, int64_t by = 1);

// clocks.cpp
int actor_of(const c10::Stream& stream);
c10::Stream stream_of(int actor);
int current_device();
void set_device(int device);
int current_actor(int device);
c10::StreamId exchange_stream(int device, c10::StreamId id);
int new_stream(int device);
std::string actor_name(int actor);
bool knows(const Clock& clock, int actor, uint64_t epoch);
void join(Clock& into, const Clock& from);
uint64_t tick(int actor);  // a new piece of work on a stream: returns its epoch
Clock& clock_of(int actor);
Capture* capturing(int actor);
Capture* capturing_thread();
void host_waits_allowed(const char* what, int site, const char* kind_in_capture = "sync_in_capture");
void host_learns(const Clock& clock);
void host_sync(int actor, const char* what, int site, const char* kind_in_capture = "sync_in_capture");
void device_sync(int device, int site);
void record(Event& event, int actor);
void wait(Event& event, int actor);
bool query(Event& event);
bool query_stream(int actor);
void synchronize(Event& event);
void busy(double milliseconds);  // so much work on the current stream: the host goes on, and whoever waits for it waits so long
void virtual_time(bool is_on);
double pass(double milliseconds);  // of the host, in virtual time; the time then
void set_share(int actor, double share);
void follow(int actor, double milliseconds);  // its next work begins no earlier
void register_guard();
int& no_sync_depth();
int& untracked_depth();

// memory.cpp
BlockRef block_of(const at::Tensor& tensor);
BlockRef block_of(const c10::DataPtr& data);
BlockRef pinned_block(const void* data);
c10::DataPtr allocate(uint64_t size, int device);
void poison(uint8_t* at, uint64_t size);
bool is_poison(const uint8_t* at, uint64_t size);
void retain(const c10::DataPtr& data, int actor);
void raise_late();
void settle();  // delivers and checks copies that the host knows to be complete
void queue_to_host(const BlockRef& pinned, uint8_t* host, std::vector<uint8_t> bytes, int actor, uint64_t epoch, int op, int site);
void queue_from_host(const BlockRef& pinned, uint8_t* host, uint64_t size, int actor, uint64_t epoch, int op, int site);
void overlay_pending(uint8_t* at, const uint8_t* host, uint64_t size, const Clock& clock, int op, int site);
void require_landed(const at::Tensor& tensor);
void empty_cache(int device);
void reset_peak(int device);
Pool* make_pool(std::pair<uint64_t, uint64_t> id);
void drop_pool(Pool* pool);
void register_memory();
std::string describe_block(const Block& block);

// access.cpp
std::vector<Range> ranges_of(const at::Tensor& tensor, const Block& block);
std::vector<Range> rows_of(const at::Tensor& tensor, const at::Tensor& rows, const Block& block);
void check_alive(const Block& block, int op, int site);
void touch(const std::vector<Access>& accesses, int actor, int op, int site);   // a new piece of work
void touch_more(const std::vector<Access>& accesses, int actor, int op, int site, const Pool* replayed = nullptr);  // further bytes of the latest one; of a replay over this pool
void save_for_undo(Capture& capture, const std::vector<Access>& accesses);
std::string text_of(Range range, const Block& block);

// native.cpp
struct DeviceScope {
  int before = current_device();
  explicit DeviceScope(int device) { set_device(device); }
  ~DeviceScope() { set_device(before); }
};
bool ours(const at::Tensor& tensor);
c10::Storage cpu_storage(const c10::Storage& storage);                           // the same bytes as host memory
at::Tensor cpu_over(const c10::Storage& storage, const at::Tensor& like);
at::Tensor host_alias(const at::Tensor& tensor);
at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);
int64_t poisoned_elements(const at::Tensor& tensor);
void register_native(torch::Library& library);
struct Touched {
  at::Tensor tensor;
  at::Tensor rows;  // undefined: all of it
  bool write;
};
void perform(const char* name, const std::vector<Touched>& touched, const std::function<void()>& run);

// fallback.cpp
void register_ops();
void run_whole(const std::string& name);  // an operation of aten that its CPU kernel serves in one piece, not by its parts
using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> call(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<bool>& written, const Function& fn);

// graph.cpp
void abandon(Capture& capture);  // ends a capture: streams leave it, memory outside of the pool is as before

// bindings.cpp
int site_here();                     // the first Python line outside torch and the simulator; takes the GIL
[[noreturn]] void raise_fault(const Violation& violation);

// Runs `body`, turning a Violation into the Python exception. `body` must not be inside a Lock of the caller.
template <typename F>
auto guarded(F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Violation& violation) {
    raise_fault(violation);
  }
}

}  // namespace sim
