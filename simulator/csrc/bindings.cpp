// The Python face of the core: call sites, faults, hooks that torch asks for, and the functions of sglcore_sim.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/TensorOptions.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <new>

namespace sim {

namespace py = pybind11;

namespace {

struct Python {
  py::object fault;                   // sglcore_sim.faults.make(kind, text) -> exception
  std::vector<std::string> skipped;   // folders whose frames are not call sites
  std::unordered_map<const void*, bool> skips;
  std::map<std::pair<const void*, int>, int> sites;
};
Python& python() {
  static auto* instance = new Python();
  return *instance;
}

bool skipped(PyCodeObject* code) {
  auto found = python().skips.find(code);
  if (found != python().skips.end()) return found->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  bool skip = !file || file[0] == '<';
  for (const std::string& folder : python().skipped) skip |= file && std::string(file).rfind(folder, 0) == 0;
  Py_INCREF(code);  // the cache is keyed by address
  return python().skips[code] = skip;
}

int site_of(PyFrameObject* frame, PyCodeObject* code) {
  auto key = std::make_pair(static_cast<const void*>(code), PyFrame_GetLineNumber(frame));
  auto found = python().sites.find(key);
  if (found != python().sites.end()) return found->second;
  std::string text = std::string(PyUnicode_AsUTF8(code->co_filename)) + ":" + std::to_string(key.second) + " in " + PyUnicode_AsUTF8(code->co_name);
  return python().sites[key] = name_id(text);
}

}  // namespace

int site_here() {
  if (!Py_IsInitialized()) return 0;
  py::gil_scoped_acquire gil;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  int site = 0;
  while (frame && !site) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!skipped(code)) site = site_of(frame, code);
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

void raise_fault(const Violation& violation) {
  py::gil_scoped_acquire gil;
  py::object fault = python().fault(violation.kind, violation.text);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(fault.ptr())), fault.ptr());
  throw py::error_already_set();
}

namespace {

// ---- hooks ----

const at::Generator& host_generator() {
  static at::Generator generator = at::detail::getDefaultCPUGenerator();
  return generator;
}

template <typename Interface>
struct Hooks : public Interface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(state().devices.size()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return device < 0 ? getCurrentDevice() : exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(state().mutex);
    return pinned_block(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(state().type); }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(state().type, static_cast<c10::DeviceIndex>(current_device())); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return host_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// What the hooks of torch's own device types ask besides, under the same names.
template <typename Interface>
struct InTreeHooks : public Hooks<Interface> {
  c10::DeviceIndex current_device() const override { return this->getCurrentDevice(); }
  std::string showConfig() const override { return "a simulated device"; }
  void deviceSynchronize(c10::DeviceIndex device) const override { c10::impl::getDeviceGuardImpl(state().type)->synchronizeDevice(device); }
};

bool rocm = false;

struct CudaHooks final : public InTreeHooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasROCM() const override { return rocm; }
  c10::Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(state().type); }
  int getNumGPUs() const override { return deviceCount(); }
};

struct XpuHooks final : public InTreeHooks<at::XPUHooksInterface> {
  bool hasXPU() const override { return true; }
  int32_t getGlobalIdxFromDevice(const at::Device& device) const override { return device.index(); }
  c10::DeviceIndex getNumGPUs() const override { return deviceCount(); }
};

struct HpuHooks final : public Hooks<at::HPUHooksInterface> {
  bool hasHPU() const override { return true; }
};

struct PrivateHooks final : public Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    auto data = c10::GetAllocator(state().type)->allocate(bytes);
    if (bytes && impl->nbytes()) std::memcpy(data.mutable_get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

// The CPU library makes its default hooks once, at import, and keeps the reference: the object itself must change.
template <typename Ours, typename Theirs>
void overwrite(const Theirs& hooks) {
  static_assert(sizeof(Ours) == sizeof(Theirs));
  new (const_cast<Theirs*>(&hooks)) Ours();
}

void register_hooks() {
  switch (state().type) {
    case c10::DeviceType::PrivateUse1: return at::RegisterPrivateUse1HooksInterface(new PrivateHooks());
    case c10::DeviceType::CUDA: return overwrite<CudaHooks>(at::detail::getCUDAHooks());
    case c10::DeviceType::XPU: return overwrite<XpuHooks>(at::detail::getXPUHooks());
    case c10::DeviceType::HPU: return overwrite<HpuHooks>(at::detail::getHPUHooks());
    default: TORCH_CHECK(false, "found torch's own device type ", state().type, ", wanted cuda, hpu, xpu, or a name that torch does not know");
  }
}

// ---- torch.accelerator.Graph ----

struct GraphImpl final : public at::GraphImplInterface {
  explicit GraphImpl(const at::GraphImplArgs&) {}
  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode) override { guarded([&] { graph.begin(pool); }); }
  void capture_end() override { guarded([&] { graph.end(); }); }
  void instantiate() override {}
  void replay() override { guarded([&] { graph.replay(); }); }
  void reset() override { graph.reset(); }
  at::MempoolId_t pool() const override { return graph.pool(); }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
  Graph graph;
};

void register_graphs() {
  std::string key = c10::DeviceTypeName(state().type, false);
  at::GraphImplRegistry()->Register(key, [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> { return std::make_unique<GraphImpl>(args); });
}

void install(const std::string& type, bool offers_graph, int devices, uint64_t memory, py::object fault, std::vector<std::string> folders) {
  State& s = state();
  TORCH_CHECK(!s.installed, "a simulated device is already installed in this process");
  s.installed = true;
  s.type = c10::Device(type).type();
  s.key = c10::computeDispatchKey(std::nullopt, c10::kStrided, c10::Device(s.type));
  s.devices.resize(devices);
  s.streams.resize(1 + devices);
  for (int d = 0; d < devices; ++d) {
    s.devices[d].capacity = memory;
    s.streams[1 + d].device = d;
  }
  python().fault = std::move(fault);
  python().skipped = std::move(folders);
  register_hooks();
  register_guard();
  register_memory();
  if (offers_graph) register_graphs();
  register_ops();
}

// A Python callable that may be dropped by a thread without the GIL.
std::shared_ptr<py::object> kept(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
}

struct Untracked {
  Untracked() { ++untracked_depth(); }
  ~Untracked() { --untracked_depth(); }
};

void launch(const std::string& name, py::object fn, const std::vector<std::tuple<at::Tensor, std::optional<at::Tensor>, bool>>& pieces) {
  auto held = kept(std::move(fn));
  std::vector<Touched> touched;
  for (const auto& [tensor, rows, write] : pieces) touched.push_back({tensor, rows.value_or(at::Tensor()), write});
  guarded([&] {
    py::gil_scoped_release release;
    perform(name.c_str(), touched, [held] {
      Untracked untracked;
      py::gil_scoped_acquire gil;
      (*held)();
    });
  });
}

using Tensors = std::vector<at::Tensor>;

Tensors call_python(const std::string& name, py::object fn, const Tensors& inputs, const std::vector<bool>& written) {
  auto held = kept(std::move(fn));
  return guarded([&] {
    py::gil_scoped_release release;
    return call(name, inputs, written, [held](const Tensors& arguments) {
      Untracked untracked;
      py::gil_scoped_acquire gil;
      return (*held)(arguments).cast<Tensors>();
    });
  });
}

void note_access(const at::Tensor& tensor, bool write, const std::string& op) {
  guarded([&] {
    py::gil_scoped_release release;
    perform(op.c_str(), {{tensor, {}, write}}, nullptr);
  });
}

void require_host(const at::Tensor& tensor) {
  guarded([&] { require_landed(tensor); });
}

py::dict stats() {
  State& s = state();
  Lock lock(s.mutex);
  py::dict result;
  for (const char* name : {"host_syncs", "event_waits", "h2d_copies", "d2h_copies", "d2d_copies", "pageable_h2d", "captures", "replays", "ops"}) result[name] = 0;
  for (auto& [name, value] : s.counters) result[name.c_str()] = value;
  uint64_t allocated = 0, peak = 0, reserved = 0;
  for (const Device& device : s.devices) {
    allocated += device.allocated;
    peak += device.peak;
    reserved += device.reserved;
  }
  result["allocated"] = allocated;
  result["peak"] = peak;
  result["reserved"] = reserved;
  result["pending"] = s.pending.size();
  result["streams"] = s.streams.size() - 1;
  return result;
}

// Everything known and settled, as after a device synchronize, without raising.
void reset() {
  State& s = state();
  std::vector<Node> dropped;
  Lock lock(s.mutex);
  while (!s.captures.empty()) {
    Capture& capture = *s.captures.begin()->second;
    for (Node& node : capture.nodes) dropped.push_back(std::move(node));
    abandon(capture);
  }
  for (Stream& stream : s.streams) {
    join(s.host, stream.clock);
    stream.until = 0;
  }
  for (const Pending& copy : s.pending)
    if (copy.to_host) std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
  s.pending.clear();
  s.limbo.clear();
  s.late.reset();
  s.counters.clear();
  for (size_t d = 0; d < s.devices.size(); ++d) reset_peak(static_cast<int>(d));
}

py::dict memory(int device) {
  Lock lock(state().mutex);
  const Device& d = state().devices.at(device);
  py::dict result;
  result["allocated"] = d.allocated;
  result["peak"] = d.peak;
  result["reserved"] = d.reserved;
  result["reserved_peak"] = d.reserved_peak;
  result["capacity"] = d.capacity;
  result["ooms"] = d.ooms;
  result["count"] = d.count;
  return result;
}

using PoolId = std::pair<uint64_t, uint64_t>;

void bind_graph(py::module_& m) {
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](Graph& graph, PoolId pool) { guarded([&] { graph.begin(pool); }); })
      .def("end", [](Graph& graph) { guarded([&] { graph.end(); }); })
      .def("replay", [](Graph& graph) {
        guarded([&] {
          py::gil_scoped_release release;
          graph.replay();
        });
      })
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool)
      .def("describe", &Graph::describe)
      .def("__len__", &Graph::size);
}

void bind_streams(py::module_& m) {
  m.def("current_stream", [](int device) { return stream_of(current_actor(device)).id(); });
  m.def("set_stream", [](int device, int64_t id) { exchange_stream(device, id); });
  m.def("new_stream", [](int device) { return stream_of(new_stream(device)).id(); });
  m.def("is_capturing", [] { return capturing(current_actor(current_device())) != nullptr; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("synchronize", [](int device) {
    guarded([&] {
      int site = site_here();
      Lock lock(state().mutex);
      device_sync(device, site);
    });
  });
  m.def("busy", [](double milliseconds) { guarded([&] { busy(milliseconds); }); });
  m.def("virtual_time", &virtual_time);
  m.def("pass_time", &pass);
  m.def("set_share", [](double share) { set_share(current_actor(current_device()), share); });
  m.def("no_sync", [](int by) { no_sync_depth() += by; });
  m.def("untracked", [](int by) { untracked_depth() += by; });
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("install", &install);
  m.def("run_whole", &run_whole);
  m.def("claim_rocm", [] { rocm = true; });
  m.def("launch", &launch);
  m.def("call", &call_python);
  m.def("access", &note_access);
  m.def("require_landed", &require_host);
  m.def("host_alias", [](const at::Tensor& tensor) { return host_alias(tensor); });
  m.def("poisoned_elements", [](const at::Tensor& tensor) { return poisoned_elements(tensor); });
  m.def("site", [] { return name_of(site_here()); });
  m.def("stats", &stats);
  m.def("memory", &memory);
  m.def("reset", &reset);
  m.def("empty_cache", &sim::empty_cache);
  m.def("reset_peak", &reset_peak);
  m.def("new_pool", [] {
    Lock lock(state().mutex);
    return std::pair<uint64_t, uint64_t>(0, ++state().pools_made);
  });
  m.def("declare_writes", [](const std::string& op, std::vector<std::string> arguments) { state().extra_writes[op] = std::move(arguments); });
  bind_graph(m);
  bind_streams(m);
}
