// What the fallback cannot do: aliases and factories, copies in every direction, declared launches.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == state().type; }

at::Tensor cpu_over(const c10::Storage& storage, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

c10::Storage cpu_storage(const c10::Storage& storage) {
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU), true);
}

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(state().type), c10::DispatchKeySet(state().key), type);
}

at::Tensor host_alias(const at::Tensor& tensor) {
  return ours(tensor) ? cpu_over(cpu_storage(tensor.storage()), tensor) : tensor;
}

int64_t poisoned_elements(const at::Tensor& tensor) {
  at::Tensor bytes = host_alias(tensor).contiguous();
  auto* at = static_cast<const uint8_t*>(bytes.const_data_ptr());
  int64_t found = 0, item = static_cast<int64_t>(bytes.itemsize());
  for (int64_t i = 0; i < bytes.numel(); ++i) found += is_poison(at + i * item, item);
  return found;
}

namespace {

std::vector<Access> accesses_of(const std::vector<Touched>& touched, bool by_rows) {
  std::vector<Access> accesses;
  for (const Touched& one : touched) {
    BlockRef block = ours(one.tensor) ? block_of(one.tensor) : pinned_block(one.tensor.const_data_ptr());
    if (!block || one.rows.defined() != by_rows) continue;
    at::Tensor cpu = host_alias(one.tensor);
    accesses.push_back({block, by_rows ? rows_of(cpu, host_alias(one.rows), *block) : ranges_of(cpu, *block), one.write, by_rows});
  }
  return accesses;
}

int device_of(const char* name, const std::vector<Touched>& touched, int site) {
  int device = -1;
  for (const Touched& one : touched) {
    if (!ours(one.tensor)) {
      if (one.tensor.dim() == 0 || one.tensor.is_pinned()) continue;
      violate("device_mismatch", std::string(name) + " at " + name_of(site) + " was given a tensor in pageable host memory.");
    }
    int index = one.tensor.device().index();
    if (device >= 0 && device != index)
      violate("device_mismatch", std::string(name) + " at " + name_of(site) + " mixes tensors of devices " + std::to_string(device) + " and " +
                                     std::to_string(index) + ".");
    device = index;
  }
  return device < 0 ? current_device() : device;
}

}  // namespace

// One piece of device work with declared accesses: native copies, launches of foreign kernels.
void perform(const char* name, const std::vector<Touched>& touched, const std::function<void()>& run) {
  if (untracked_depth() > 0) return run ? run() : void();
  int site = site_here(), op = name_id(name), actor = current_actor(device_of(name, touched, site));
  std::vector<Access> fixed = accesses_of(touched, false), rows = accesses_of(touched, true);
  {
    Lock lock(state().mutex);
    touch(fixed, actor, op, site);
    touch_more(rows, actor, op, site);
    count("ops");
  }
  if (!run) return;
  std::unique_lock<std::recursive_mutex> lock(state().mutex);
  Capture* capture = capturing(actor);
  if (!capture) {
    lock.unlock();
    return run();
  }
  Node node;  // a capture computes nothing, and nothing here has a shape to find out
  node.op = op;
  node.site = site;
  node.accesses = std::move(fixed);
  node.accesses.insert(node.accesses.end(), rows.begin(), rows.end());
  if (!rows.empty()) node.dynamic = [touched] { return accesses_of(touched, true); };
  node.run = [run](int) { run(); };
  capture->nodes.push_back(std::move(node));
}

namespace {

// ---- copies ----

void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  at::Tensor target = host_alias(to), source = host_alias(from);
  perform("aten::copy_", {{from, {}, false}, {to, {}, true}}, [target, source] {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  });
}

void copy_between_devices(const at::Tensor& to, const at::Tensor& from) {
  int site = site_here(), op = name_id("aten::copy_");
  int reader = current_actor(from.device().index()), writer = current_actor(to.device().index());
  {
    Lock lock(state().mutex);
    if (untracked_depth() == 0) {
      if (capturing(reader) || capturing(writer))
        violate("wrong_capture", "a copy between devices at " + name_of(site) + " during a capture is not simulated.");
      Clock& from_clock = state().streams.at(reader).clock;
      join(from_clock, state().streams.at(writer).clock);
      std::vector<Access> accesses;
      if (BlockRef block = block_of(from)) accesses.push_back({block, ranges_of(from, *block), false});
      if (BlockRef block = block_of(to)) accesses.push_back({block, ranges_of(to, *block), true});
      touch(accesses, reader, op, site);
      join(state().streams.at(writer).clock, from_clock);
      follow(reader, state().streams.at(writer).until);
      follow(writer, state().streams.at(reader).until);
      count("d2d_copies");
    }
  }
  host_alias(to).copy_(host_alias(from));
}

struct Transfer {
  at::Tensor device, host;
  BlockRef pinned;
  int actor, site, op;
  std::vector<Access> accesses;
};

Transfer plan_transfer(const at::Tensor& device, const at::Tensor& host, bool to_host) {
  Transfer t{device, host, nullptr, current_actor(device.device().index()), site_here(), name_id(to_host ? "copy to host" : "copy from host"), {}};
  {
    Lock lock(state().mutex);
    t.pinned = pinned_block(host.const_data_ptr());
  }
  if (BlockRef block = block_of(device)) t.accesses.push_back({block, ranges_of(device, *block), !to_host, false, to_host});
  if (t.pinned) {
    uint64_t lo = static_cast<const uint8_t*>(host.const_data_ptr()) - t.pinned->chunk->base;
    t.accesses.push_back({t.pinned, {{lo, lo + host.nbytes()}}, to_host});
  }
  return t;
}

void refuse_in_capture(const Transfer& t, bool asynchronous, const char* direction) {
  if (!capturing(t.actor) || asynchronous) return;
  violate("pageable_in_capture", std::string("a copy ") + direction + " at " + name_of(t.site) + " during a capture " +
                                     (t.pinned ? "waits for the device (non_blocking is not set)." : "goes through pageable host memory.") +
                                     " Use a contiguous pinned buffer of the same dtype with non_blocking=True, or copy outside of the capture.");
}

void send_from_host(const Transfer& t, const at::Tensor& target, int actor) {
  uint64_t size = t.host.nbytes();
  auto* host = static_cast<uint8_t*>(const_cast<void*>(t.host.const_data_ptr()));
  std::vector<uint8_t> bytes(host, host + size);
  uint64_t epoch;
  {
    Lock lock(state().mutex);
    overlay_pending(bytes.data(), host, size, state().streams.at(actor).clock, t.op, t.site);
    epoch = clock_of(actor).at(actor);
    t.pinned->retained.insert(actor);  // torch keeps it for this stream, whatever else runs there; it sees no kernels
    count("h2d_copies");
    bool rewritten = std::memcmp(bytes.data(), host, size) != 0;
    if (!capturing(actor) && !rewritten) queue_from_host(t.pinned, host, size, actor, epoch, t.op, t.site);
  }
  at::Tensor source = at::from_blob(bytes.data(), t.host.sizes(), t.host.strides(), t.host.options().pinned_memory(false));
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(source);
}

void add_node(const Transfer& t, std::function<void(int)> run) {
  Capture* capture = capturing(t.actor);
  if (!capture) return;
  Node node;
  node.op = t.op;
  node.site = t.site;
  node.accesses = t.accesses;
  node.run = std::move(run);
  capture->nodes.push_back(std::move(node));
}

void copy_from_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  Transfer t = plan_transfer(to, from, false);
  bool staged = !t.pinned || !from.is_contiguous() || from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes();
  bool asynchronous = non_blocking && !staged;
  at::Tensor target = host_alias(to);
  if (untracked_depth() > 0) return (void)target.copy_(from);
  {
    Lock lock(state().mutex);
    refuse_in_capture(t, asynchronous, "from the host");
    if (staged) count("pageable_h2d");
    if (!asynchronous) host_waits_allowed(staged ? "a copy from pageable host memory" : "a blocking copy from the host", t.site);
    touch(t.accesses, t.actor, t.op, t.site);
    if (Capture* capture = capturing(t.actor)) save_for_undo(*capture, t.accesses);
  }
  if (asynchronous) {
    // The host tensor of a captured copy must stay: a view by address, its block is checked at replay.
    t.host = at::from_blob(const_cast<void*>(from.const_data_ptr()), from.sizes(), from.strides(), from.options().pinned_memory(false));
    t.device = at::Tensor();
    send_from_host(t, target, t.actor);
    Lock lock(state().mutex);
    return add_node(t, [t, target](int actor) { send_from_host(t, target, actor); });
  }
  require_landed(from);
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(from);
  Lock lock(state().mutex);
  count("h2d_copies");
  host_sync(t.actor, "a blocking copy from the host", t.site);
}

void send_to_host(const Transfer& t, const at::Tensor& source, int actor) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor ready = source.to(t.host.scalar_type()).expand(t.host.sizes()).contiguous();
  auto* data = static_cast<const uint8_t*>(ready.const_data_ptr());
  std::vector<uint8_t> bytes(data, data + ready.nbytes());
  Lock lock(state().mutex);
  if (capturing(actor)) return;  // nothing arrives during a capture
  count("d2h_copies");
  t.pinned->retained.insert(actor);
  queue_to_host(t.pinned, static_cast<uint8_t*>(t.host.mutable_data_ptr()), std::move(bytes), actor, clock_of(actor).at(actor), t.op, t.site);
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  Transfer t = plan_transfer(from, to, true);
  bool asynchronous = non_blocking && t.pinned && to.is_contiguous();
  at::Tensor source = host_alias(from);
  if (untracked_depth() > 0) return (void)to.copy_(source);
  {
    Lock lock(state().mutex);
    refuse_in_capture(t, asynchronous, "to the host");
    if (!asynchronous) host_waits_allowed(t.pinned ? "a blocking copy to the host" : "a copy to pageable host memory", t.site);
    touch(t.accesses, t.actor, t.op, t.site);
  }
  if (asynchronous) {
    t.host = at::from_blob(to.mutable_data_ptr(), to.sizes(), to.strides(), to.options().pinned_memory(false));
    t.device = at::Tensor();
    send_to_host(t, source, t.actor);
    Lock lock(state().mutex);
    return add_node(t, [t, source](int actor) { send_to_host(t, source, actor); });
  }
  {
    Lock lock(state().mutex);
    count("d2h_copies");
    host_sync(t.actor, "a blocking copy to the host", t.site);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(source);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(from)) return self;
  return guarded([&]() -> at::Tensor& {
    if (ours(self) && ours(from)) {
      self.device() == from.device() ? copy_on_device(self, from) : copy_between_devices(self, from);
    } else if (ours(self)) {
      copy_from_host(self, from, non_blocking);
    } else {
      copy_to_host(self, from, non_blocking);
    }
    return self;
  });
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  at::Tensor target = to;
  return copy_(target, self, false);
}

// ---- native operations ----

int device_index(const std::optional<c10::Device>& device) { return device && device->has_index() ? device->index() : current_device(); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  DeviceScope scope(device_index(device));
  return at::detail::empty_generic(size, c10::GetAllocator(state().type), c10::DispatchKeySet(state().key), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<c10::Device> device,
                         std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_on(device_index(device), size, stride, c10::dtype_or_default(type));
}

at::Scalar local_scalar(const at::Tensor& self) {
  return guarded([&] {
    if (untracked_depth() == 0) {
      int site = site_here(), op = name_id("aten::item"), actor = current_actor(self.device().index());
      Lock lock(state().mutex);
      host_waits_allowed("reading a number (item, int, bool, tolist)", site);
      BlockRef block = block_of(self);
      if (block) touch({{block, ranges_of(self, *block), false, false, true}}, actor, op, site);
      host_sync(actor, "reading a number (item, int, bool, tolist)", site);
    }
    return at::_local_scalar_dense(host_alias(self));
  });
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t count = c10::multiply_integers(size);
  size_t bytes = (self.storage_offset() + count) * self.itemsize();
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (count && bytes > storage->nbytes()) {
    DeviceScope scope(self.device().index());
    auto data = c10::GetAllocator(state().type)->allocate(bytes);
    if (storage->nbytes()) std::memcpy(data.mutable_get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  at::Tensor none = empty_on(self.device().index(), {0}, {1}, self.scalar_type());
  return set_tensor(self, none);
}

void record_stream(at::Tensor& self, c10::Stream stream) { retain(self.storage().data_ptr(), actor_of(stream)); }

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }

}  // namespace

void register_native(torch::Library& m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
}


}  // namespace sim
