// Streams, events and the device guard: who is ordered after whom, by vector clocks.
#include "sim.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace sim {

State& state() {
  static State* instance = new State();  // leaked: tensors may outlive static destruction
  return *instance;
}

void violate(const char* kind, const std::string& text) {
  Lock lock(state().mutex);
  Capture* capture = capturing_thread();
  if (capture && !capture->broken) capture->broken = Violation{kind, text};
  throw Violation{kind, text};
}

int name_id(const std::string& name) {
  State& s = state();
  Lock lock(s.mutex);
  auto found = s.name_ids.find(name);
  if (found != s.name_ids.end()) return found->second;
  s.names.push_back(name);
  return s.name_ids[name] = static_cast<int>(s.names.size()) - 1;
}

std::string name_of(int id) {
  State& s = state();
  Lock lock(s.mutex);
  return s.names.at(id).empty() ? "an unknown place" : s.names[id];
}

void count(const char* name, int64_t by) {
  Lock lock(state().mutex);
  state().counters[name] += by;
}

namespace {
thread_local int this_device = 0;
thread_local std::vector<c10::StreamId> this_streams;
thread_local int forbidden = 0;
thread_local int untracked = 0;

double now_ms() {
  using namespace std::chrono;
  if (state().is_virtual) return state().virtual_ms;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void rest_until(double milliseconds) {
  if (state().is_virtual) {
    state().virtual_ms = std::max(state().virtual_ms, milliseconds);
    return;
  }
  double left = milliseconds - now_ms();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(left));
}

void lengthen(int actor, double milliseconds) {
  Lock lock(state().mutex);
  Stream& stream = state().streams.at(actor);
  double begin = std::max(stream.until, now_ms()), together = 0;
  if (state().is_virtual && stream.share > 0) {  // as long as others of the device work too, it has a share
    for (const Stream& other : state().streams)
      if (&other != &stream && other.device == stream.device && other.share > 0) together = std::max(together, other.until - begin);
    together = std::min(together, milliseconds / stream.share);
  }
  stream.until = begin + milliseconds + together * (1 - stream.share);
}
}  // namespace

void virtual_time(bool is_on) {
  State& s = state();
  Lock lock(s.mutex);
  s.is_virtual = is_on;
  s.virtual_ms = 0;
  for (Stream& stream : s.streams) {
    stream.until = 0;
    stream.share = 0.5;
  }
}

double pass(double milliseconds) {
  Lock lock(state().mutex);
  return state().virtual_ms += milliseconds;
}

void set_share(int actor, double share) {
  Lock lock(state().mutex);
  state().streams.at(actor).share = share;
}

int& no_sync_depth() { return forbidden; }
int& untracked_depth() { return untracked; }

int current_device() { return this_device; }

void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < static_cast<int>(state().devices.size()), "invalid device ordinal ", device, ": ",
              state().devices.size(), " simulated devices exist");
  this_device = device;
}

int actor_of(const c10::Stream& stream) {
  int device = stream.device().has_index() ? stream.device_index() : this_device;
  return stream.id() == 0 ? 1 + device : static_cast<int>(stream.id());
}

c10::Stream stream_of(int actor) {
  int devices = static_cast<int>(state().devices.size());
  c10::StreamId id = actor <= devices ? 0 : actor;
  c10::Device device(state().type, static_cast<c10::DeviceIndex>(state().streams.at(actor).device));
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

int current_actor(int device) {
  if (this_streams.size() <= static_cast<size_t>(device)) this_streams.resize(device + 1, 0);
  return this_streams[device] == 0 ? 1 + device : static_cast<int>(this_streams[device]);
}

c10::StreamId exchange_stream(int device, c10::StreamId id) {
  current_actor(device);
  return std::exchange(this_streams[device], id);
}

int new_stream(int device) {
  State& s = state();
  Lock lock(s.mutex);
  Stream made;
  made.device = device;
  s.streams.push_back(made);
  return static_cast<int>(s.streams.size()) - 1;
}

std::string actor_name(int actor) {
  State& s = state();
  std::string device = c10::Device(s.type, static_cast<c10::DeviceIndex>(s.streams.at(actor).device)).str();
  if (actor <= static_cast<int>(s.devices.size())) return "the default stream of " + device;
  return "stream " + std::to_string(actor) + " of " + device;
}

bool knows(const Clock& clock, int actor, uint64_t epoch) {
  return epoch == 0 || (static_cast<size_t>(actor) < clock.size() && clock[actor] >= epoch);
}

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

Capture* capturing(int actor) { return state().streams.at(actor).capture; }

Capture* capturing_thread() {
  for (auto& [id, capture] : state().captures)
    if (capture->thread == std::this_thread::get_id()) return capture.get();
  return nullptr;
}

Clock& clock_of(int actor) {
  Stream& stream = state().streams.at(actor);
  return stream.capture ? stream.captured : stream.clock;
}

uint64_t tick(int actor) {
  Stream& stream = state().streams.at(actor);
  Clock& clock = clock_of(actor);
  if (!stream.capture) join(clock, state().host);
  if (clock.size() <= static_cast<size_t>(actor)) clock.resize(actor + 1, 0);
  stream.polls = 0;
  return ++clock[actor];
}

void host_waits_allowed(const char* what, int site, const char* kind_in_capture) {
  if (untracked) return;
  if (Capture* capture = capturing_thread())
    violate(kind_in_capture, std::string(what) + " at " + name_of(site) + " makes the host wait while " +
                                 actor_name(capture->origin) + " is being captured. Nothing runs during a capture: read the " +
                                 "value after replay, or keep it on the device.");
  if (forbidden)
    violate("sync_forbidden", std::string(what) + " at " + name_of(site) +
                                  " makes the host wait for the device inside a no_sync region. Keep the value on the device, or " +
                                  "copy it to pinned memory and wait for an event later.");
}

void follow(int actor, double milliseconds) {
  Stream& stream = state().streams.at(actor);
  stream.until = std::max(stream.until, milliseconds);
}

void busy(double milliseconds) {
  int site = site_here(), op = name_id("busy"), actor = current_actor(current_device());
  Lock lock(state().mutex);
  touch({}, actor, op, site);
  Capture* capture = capturing(actor);
  if (!capture) return lengthen(actor, milliseconds);
  Node node;
  node.op = op;
  node.site = site;
  node.run = [milliseconds](int replaying) { lengthen(replaying, milliseconds); };
  capture->nodes.push_back(std::move(node));
}

void host_learns(const Clock& clock) {
  join(state().host, clock);
  settle();
}

void host_sync(int actor, const char* what, int site, const char* kind_in_capture) {
  if (untracked) return;
  host_waits_allowed(what, site, kind_in_capture);
  if (capturing(actor))
    violate(kind_in_capture, std::string(what) + " at " + name_of(site) + " waits for " + actor_name(actor) + ", which is being captured.");
  count("host_syncs");
  rest_until(state().streams.at(actor).until);
  host_learns(state().streams.at(actor).clock);
}

void device_sync(int device, int site) {
  State& s = state();
  host_waits_allowed("a device synchronize", site);
  for (auto& [id, capture] : s.captures)
    if (capture->device == device)
      violate("sync_in_capture", "a device synchronize at " + name_of(site) + " while " + actor_name(capture->origin) + " is being captured.");
  count("host_syncs");
  for (size_t actor = 1; actor < s.streams.size(); ++actor) {
    if (s.streams[actor].device != device) continue;
    rest_until(s.streams[actor].until);
    join(s.host, s.streams[actor].clock);
  }
  settle();
}

void record(Event& event, int actor) {
  Lock lock(state().mutex);
  Stream& stream = state().streams.at(actor);
  if (!stream.capture) join(stream.clock, state().host);
  event.recorded = true;
  event.actor = actor;
  event.device = stream.device;
  event.clock = clock_of(actor);
  event.capture = stream.capture ? stream.capture->id : 0;
  event.polls = 0;
  event.milliseconds = std::max(now_ms(), stream.until);
}

namespace {
void join_capture(Event& event, int actor, Stream& stream, int site) {
  State& s = state();
  auto found = s.captures.find(event.capture);
  if (found == s.captures.end())
    violate("wrong_capture", actor_name(actor) + " waits at " + name_of(site) +
                                 " for an event that was recorded in a capture which has ended; record it again outside of the capture.");
  Capture* capture = found->second.get();
  if (stream.capture && stream.capture != capture)
    violate("wrong_capture", actor_name(actor) + " waits at " + name_of(site) + " for an event of another capture.");
  if (!stream.capture) {
    if (actor <= static_cast<int>(s.devices.size()))
      violate("wrong_capture", actor_name(actor) + " cannot join a capture (at " + name_of(site) + "); fork to a stream of your own.");
    stream.capture = capture;
    stream.captured.clear();
    capture->actors.insert(actor);
  }
  join(stream.captured, event.clock);
}
}  // namespace

void wait(Event& event, int actor) {
  int site = site_here();
  State& s = state();
  Lock lock(s.mutex);
  if (!event.recorded) return;
  Stream& stream = s.streams.at(actor);
  if (event.capture) return join_capture(event, actor, stream, site);
  if (stream.capture)
    violate("wrong_capture", actor_name(actor) + ", which is being captured, waits at " + name_of(site) + " for an event recorded outside " +
                                 "of the capture on " + actor_name(event.actor) + ". Wait before the capture begins, or record the event inside it.");
  join(stream.clock, event.clock);
  follow(actor, event.milliseconds);
}

namespace {
void refuse_captured(const Event& event, const char* what, int site) {
  if (event.capture)
    violate("sync_in_capture", std::string(what) + " at " + name_of(site) + " on an event that was recorded inside a capture.");
}
}  // namespace

bool query(Event& event) {
  int site = site_here();
  State& s = state();
  Lock lock(s.mutex);
  if (!event.recorded) return true;
  refuse_captured(event, "a query", site);
  if (capturing_thread()) violate("sync_in_capture", "an event query at " + name_of(site) + " during a capture.");
  bool known = event.actor < static_cast<int>(event.clock.size()) ? knows(s.host, event.actor, event.clock[event.actor]) : true;
  if (!known && (event.milliseconds > now_ms() || event.polls++ < POLLS)) return false;
  host_learns(event.clock);
  return true;
}

bool query_stream(int actor) {
  int site = site_here();
  State& s = state();
  Lock lock(s.mutex);
  if (capturing(actor) || capturing_thread())
    violate("sync_in_capture", "a query of " + actor_name(actor) + " at " + name_of(site) + " during a capture.");
  Stream& stream = s.streams.at(actor);
  bool known = actor < static_cast<int>(stream.clock.size()) ? knows(s.host, actor, stream.clock[actor]) : true;
  if (!known && (stream.until > now_ms() || stream.polls++ < POLLS)) return false;
  host_learns(stream.clock);
  return true;
}

void synchronize(Event& event) {
  int site = site_here();
  Clock reached;
  double ready;
  {
    Lock lock(state().mutex);
    if (!event.recorded) return;
    refuse_captured(event, "a synchronize", site);
    if (capturing_thread()) violate("sync_in_capture", "an event synchronize at " + name_of(site) + " during a capture.");
    count("event_waits");
    reached = event.clock;
    ready = event.milliseconds;
  }
  rest_until(ready);  // other threads go on
  Lock lock(state().mutex);
  host_learns(reached);
}

namespace {
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return state().type; }
  c10::Device at(int index) const { return c10::Device(state().type, static_cast<c10::DeviceIndex>(index)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = at(current_device());
    set_device(device.index());
    return old;
  }
  c10::Device getDevice() const override { return at(current_device()); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_actor(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(1 + index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream_of(new_stream(index(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(new_stream(index(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    int before = current_actor(device);
    exchange_stream(device, stream.id());
    return stream_of(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() == 0 ? 0 : 0x5100000 + stream.id() * 64);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    sim::record(*static_cast<Event*>(*event), actor_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) guarded([&] { wait(*static_cast<Event*>(event), actor_of(stream)); });
  }
  bool queryEvent(void* event) const override {
    return !event || guarded([&] { return query(*static_cast<Event*>(event)); });
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(state().devices.size()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }
  bool queryStream(const c10::Stream& stream) const override {
    return guarded([&] { return query_stream(actor_of(stream)); });
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    guarded([&] {
      int site = site_here();
      Lock lock(state().mutex);
      host_sync(actor_of(stream), "a stream synchronize", site);
    });
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    return capturing(actor_of(stream)) != nullptr;
  }
  void synchronizeEvent(void* event) const override {
    if (event) guarded([&] { synchronize(*static_cast<Event*>(event)); });
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    guarded([&] {
      int site = site_here();
      Lock lock(state().mutex);
      device_sync(device < 0 ? current_device() : device, site);
    });
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { retain(data, actor_of(stream)); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before their times are compared");
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};
}  // namespace

void register_guard() { c10::impl::registerDeviceGuard(state().type, new Guard()); }

}  // namespace sim
