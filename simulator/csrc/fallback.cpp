// The boxed fallback: any operation runs its CPU kernel over the same bytes, checked, and recorded in a capture.
#include "sim.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

namespace {

using torch::jit::Stack;

// ---- what an operation does with its arguments ----

enum class Waits { no, scalar, shape, mask };

struct Info {
  int name;
  bool view = false;
  Waits waits = Waits::no;
  int indexed = -1;                 // argument whose rows are picked by `index`
  int index = -1;
  int dim = -1;                     // position of the dimension argument; -1: always 0
  std::vector<bool> writes, out;    // per argument
  std::vector<int> index_args;      // arguments holding indices: checked for poison
};

struct RowRule {
  const char* indexed;
  const char* index;
  const char* dim;
};

const std::map<std::string, RowRule>& row_rules() {
  static const std::map<std::string, RowRule> rules = {
      {"aten::index_select", {"self", "index", "dim"}},   {"aten::gather", {"self", "index", "dim"}},
      {"aten::embedding", {"weight", "indices", nullptr}}, {"aten::index", {"self", "indices", nullptr}},
      {"aten::index_put_", {"self", "indices", nullptr}}, {"aten::_index_put_impl_", {"self", "indices", nullptr}},
      {"aten::index_copy_", {"self", "index", "dim"}},    {"aten::index_add_", {"self", "index", "dim"}},
      {"aten::index_fill_", {"self", "index", "dim"}},    {"aten::scatter_", {"self", "index", "dim"}},
      {"aten::scatter_add_", {"self", "index", "dim"}},   {"aten::scatter_reduce_", {"self", "index", "dim"}},
      {"aten::_unsafe_index", {"self", "indices", nullptr}},
  };
  return rules;
}

Waits waits_of(const std::string& name, const std::string& overload) {
  static const std::set<std::string> shapes = {"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
                                               "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
                                               "aten::nonzero_static_dynamic"};
  if (name == "aten::equal") return Waits::scalar;
  if (shapes.count(name) || (name == "aten::repeat_interleave" && overload == "Tensor")) return Waits::shape;
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::_unsafe_index") return Waits::mask;
  return Waits::no;
}

Info make_info(const c10::FunctionSchema& schema) {
  Info info;
  info.name = name_id(schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name()));
  for (const auto& result : schema.returns()) info.view |= result.alias_info() && !result.alias_info()->isWrite();
  info.waits = waits_of(schema.name(), schema.overload_name());
  auto rule = row_rules().find(schema.name());
  auto extra = state().extra_writes.find(name_of(info.name));
  int position = 0;
  for (const auto& argument : schema.arguments()) {
    bool write = argument.alias_info() && argument.alias_info()->isWrite();
    if (extra != state().extra_writes.end())
      for (const auto& name : extra->second) write |= name == argument.name();
    info.writes.push_back(write);
    info.out.push_back(write && argument.kwarg_only());
    if (rule != row_rules().end()) {
      if (argument.name() == rule->second.indexed) info.indexed = position;
      if (argument.name() == rule->second.index) info.index = position;
      if (rule->second.dim && argument.name() == rule->second.dim) info.dim = position;
    }
    if (argument.name() == "index" || argument.name() == "indices") info.index_args.push_back(position);
    ++position;
  }
  return info;
}

const Info& info_of(const c10::OperatorHandle& op) {
  static std::unordered_map<const void*, Info> cache;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  const auto& schema = op.schema();
  auto found = cache.find(&schema);
  return found != cache.end() ? found->second : cache.emplace(&schema, make_info(schema)).first->second;
}

// ---- aliases ----

at::Tensor device_view(const c10::Storage& storage, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(state().key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A CPU result becomes a block of the device, in the same layout where that is dense.
at::Tensor adopt(const at::Tensor& result, int device) {
  std::vector<int64_t> strides = result.strides().vec();
  at::Tensor source = result;
  if (!result.is_non_overlapping_and_dense()) {
    source = result.contiguous();
    strides = source.strides().vec();
  }
  at::Tensor made = empty_on(device, source.sizes(), strides, source.scalar_type());
  if (source.numel()) std::memcpy(made.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  if (result.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

struct Aliases {
  struct Pair {
    at::Tensor device, cpu;
    bool write;
  };
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;
  std::vector<Pair> pairs;

  at::Tensor add(const at::Tensor& tensor, bool write) {
    for (Pair& pair : pairs)
      if (pair.device.is_same(tensor)) {
        pair.write |= write;
        return pair.cpu;
      }
    auto* key = tensor.storage().unsafeGetStorageImpl();
    const c10::Storage* found = nullptr;
    for (auto& [storage, cpu] : storages)
      if (storage == key) found = &cpu;
    if (!found) {
      storages.emplace_back(key, cpu_storage(tensor.storage()));
      found = &storages.back().second;
    }
    pairs.push_back({tensor, cpu_over(*found, tensor), write});
    return pairs.back().cpu;
  }
};

// ---- one call of the fallback ----

using Kernel = std::function<void(Stack&)>;  // arguments in, results out

struct Call {
  Kernel kernel;
  const Info& info;
  int device = -1;
  int site = 0;
  bool host_indices = false;
  Aliases aliases;
  std::vector<Access> accesses;
};

void find_device(Call& call, const at::IValue& value) {
  auto look = [&](const at::Tensor& tensor) {
    if (ours(tensor) && (call.device < 0 || tensor.dim() > 0)) {
      int index = tensor.device().index();
      if (call.device >= 0 && index != call.device)
        violate("device_mismatch", name_of(call.info.name) + " at " + name_of(call.site) + " mixes tensors of devices " + std::to_string(call.device) +
                                       " and " + std::to_string(index) + ". Copy one of them to the other device first.");
      call.device = index;
    }
  };
  if (value.isTensor()) {
    look(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) look(*tensor);
  } else if (value.isDevice() && value.toDevice().type() == state().type && call.device < 0) {
    call.device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
  }
}

at::Tensor convert(Call& call, const at::Tensor& tensor, int position) {
  if (!tensor.defined()) return tensor;
  if (ours(tensor)) return call.aliases.add(tensor, call.info.writes[position]);
  if (tensor.device().is_cpu() && tensor.dim() > 0 && !untracked_depth()) {
    if (call.info.index == position && call.info.waits == Waits::mask) {
      call.host_indices = true;
    } else if (!call.info.view) {
      violate("device_mismatch", name_of(call.info.name) + " at " + name_of(call.site) + " mixes a host tensor of shape " + c10::str(tensor.sizes()) +
                                     " with tensors of device " + std::to_string(call.device) + ". Copy it to the device first.");
    }
  }
  return tensor;
}

at::IValue convert(Call& call, const at::IValue& value, int position) {
  if (value.isTensor()) return convert(call, value.toTensor(), position);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(call, tensor, position));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(convert(call, *tensor, position)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == state().type) return c10::Device(c10::DeviceType::CPU);
  return value;
}

// Index operations on dimension 0 touch only the rows named.
at::Tensor rows_wanted(const Call& call, const Stack& cpu) {
  const Info& info = call.info;
  if (info.indexed < 0 || info.index < 0) return {};
  if (info.dim >= 0 && (!cpu[info.dim].isInt() || cpu[info.dim].toInt() != 0)) return {};
  const at::IValue& index = cpu[info.index];
  at::Tensor rows;
  if (index.isTensor()) rows = index.toTensor();
  if (index.isOptionalTensorList()) {
    auto list = index.toOptionalTensorVector();
    if (!list.empty() && list[0]) rows = *list[0];
  }
  if (index.isTensorList() && !index.toTensorVector().empty()) rows = index.toTensorVector()[0];
  bool usable = rows.defined() && (rows.scalar_type() == at::kLong || rows.scalar_type() == at::kInt);
  return usable && cpu[info.indexed].isTensor() ? rows : at::Tensor();
}

void plan_accesses(Call& call, const Stack& cpu, std::vector<Access>& accesses) {
  at::Tensor rows = rows_wanted(call, cpu);
  const at::TensorImpl* indexed = rows.defined() ? cpu[call.info.indexed].toTensor().unsafeGetTensorImpl() : nullptr;
  for (auto& pair : call.aliases.pairs) {
    BlockRef block = block_of(pair.device);
    if (!block) continue;
    bool by_rows = pair.cpu.unsafeGetTensorImpl() == indexed;
    accesses.push_back({block, by_rows ? rows_of(pair.cpu, rows, *block) : ranges_of(pair.cpu, *block), pair.write, by_rows});
  }
}

int64_t poison_value(at::ScalarType type) { return type == at::kLong ? 0x7FFF7FFF7FFF7FFF : 0x7FFF7FFF; }

void check_indices(const Call& call, const at::IValue& value) {
  auto look = [&](const at::Tensor& index) {
    if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) return;
    if (index.numel() && index.eq(poison_value(index.scalar_type())).any().item<bool>())
      violate("uninitialised", name_of(call.info.name) + " at " + name_of(call.site) + " takes an index from memory that nothing has written" +
                                   (call.aliases.pairs.empty() ? "." : ": a tensor of shape " + c10::str(index.sizes()) + "."));
  };
  if (value.isTensor()) look(value.toTensor());
  if (value.isOptionalTensorList())
    for (const auto& index : value.toOptionalTensorVector())
      if (index) look(*index);
}

bool has_mask(const at::IValue& value) {
  bool found = false;
  if (value.isOptionalTensorList())
    for (const auto& index : value.toOptionalTensorVector()) found |= index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  return found;
}

// Where the real device would make the host wait: shapes and numbers that only the device knows.
void check_waits(const Call& call, const Stack& cpu, int actor) {
  if (call.info.waits == Waits::no && !call.host_indices) return;
  std::string what = name_of(call.info.name);
  if (call.host_indices) {
    if (capturing(actor)) violate("pageable_in_capture", what + " at " + name_of(call.site) + " takes indices from host memory during a capture.");
    count("pageable_h2d");
    return host_sync(actor, (what + " with indices in host memory").c_str(), call.site);
  }
  if (call.info.waits == Waits::shape && cpu.size() == 2 && cpu[1].isInt()) return;  // repeat_interleave was told its size
  if (call.info.waits == Waits::mask) {
    if (!has_mask(cpu[call.info.index])) return;
    bool fill = cpu.size() > 2 && cpu[2].isTensor() && cpu[2].toTensor().numel() == 1 && !call.info.writes.empty() && call.info.writes[0];
    if (fill) return;
    what += " with a boolean mask";
  }
  host_sync(actor, what.c_str(), call.site, call.info.waits == Waits::scalar ? "sync_in_capture" : "data_dependent");
}

// Backends outside of torch bring their own convolution; the CPU's is behind the general operator.
c10::OperatorHandle cpu_operator(const c10::OperatorHandle& op) {
  if (op.schema().name() != "aten::convolution_overrideable") return op;
  return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
}

// The depthwise convolution of one vendor's backend: input, weight, kernel size, bias, stride, padding, dilation.
void depthwise_on_cpu(Stack& stack) {
  at::Tensor input = stack[0].toTensor();
  std::optional<at::Tensor> bias = stack[3].toOptional<at::Tensor>();
  std::vector<int64_t> stride = stack[4].toIntVector(), padding = stack[5].toIntVector(), dilation = stack[6].toIntVector();
  at::Tensor found = at::convolution(input, stack[1].toTensor(), bias, stride, padding, dilation, false, {0, 0}, input.size(1));
  stack.assign(1, found);
}

Kernel cpu_kernel(const c10::OperatorHandle& op) {
  if (op.schema().name() == "aten::_conv_depthwise2d") return depthwise_on_cpu;
  return [op](Stack& stack) { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); };
}

void run_cpu(const Kernel& kernel, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
  kernel(stack);
}

using Target = std::pair<BlockRef, at::Tensor>;

// `out=` tensors that the CPU kernel resized; those that have new memory, which a replay writes too.
std::vector<Target> propagate_resize(Aliases& aliases) {
  std::vector<Target> grown;
  for (auto& pair : aliases.pairs) {
    if (!pair.write) continue;
    c10::StorageImpl* storage = pair.device.storage().unsafeGetStorageImpl();
    if (pair.cpu.storage().data() != storage->data() && pair.cpu.storage().nbytes()) {
      DeviceScope scope(pair.device.device().index());
      auto data = c10::GetAllocator(state().type)->allocate(pair.cpu.storage().nbytes());
      std::memcpy(data.mutable_get(), pair.cpu.storage().data(), pair.cpu.storage().nbytes());
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(pair.cpu.storage().nbytes());
      c10::Storage host = cpu_storage(pair.device.storage());
      for (auto& [device, known] : aliases.storages)
        if (device == storage) known = host;
      pair.cpu.set_(host, pair.cpu.storage_offset(), pair.cpu.sizes(), pair.cpu.strides());
      if (BlockRef block = block_of(pair.device)) grown.emplace_back(block, pair.cpu);
    }
    if (pair.cpu.sizes() != pair.device.sizes() || pair.cpu.strides() != pair.device.strides())
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides(), pair.cpu.storage_offset());
  }
  return grown;
}

at::Tensor give_back(Call& call, const at::Tensor& result, std::vector<Target>& fresh) {
  if (!result.defined()) return result;
  for (auto& pair : call.aliases.pairs)
    if (pair.cpu.is_same(result)) return pair.device;
  if (result.has_storage())
    for (auto& [device, cpu] : call.aliases.storages)
      if (cpu.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        for (auto& pair : call.aliases.pairs)
          if (pair.device.storage().unsafeGetStorageImpl() == device) return device_view(pair.device.storage(), result);
      }
  at::Tensor made = adopt(result, call.device);
  if (BlockRef block = block_of(made)) fresh.emplace_back(block, cpu_over(cpu_storage(made.storage()), made));
  return made;
}

at::IValue give_back(Call& call, const at::IValue& result, std::vector<Target>& fresh) {
  if (result.isTensor()) return give_back(call, result.toTensor(), fresh);
  if (!result.isTensorList()) return result;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : result.toTensorVector()) list.push_back(give_back(call, tensor, fresh));
  return list;
}

// The tensors among a replay's results that were fresh when captured, in the same order.
void collect_fresh(const at::IValue& result, const std::vector<const void*>& known, std::vector<at::Tensor>& found) {
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.numel()) return;
    for (const void* storage : known)
      if (tensor.storage().unsafeGetStorageImpl() == storage) return;
    found.push_back(tensor);
  };
  if (result.isTensor()) look(result.toTensor());
  if (result.isTensorList())
    for (const at::Tensor& tensor : result.toTensorVector()) look(tensor);
}

void deliver(const std::vector<at::Tensor>& results, const std::vector<Target>& targets, int op, int site) {
  if (results.size() != targets.size()) violate("data_dependent", name_of(op) + " captured at " + name_of(site) + " gave another number of results on replay.");
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].sizes() != targets[i].second.sizes())
      violate("data_dependent", name_of(op) + " captured at " + name_of(site) + " gave shape " + c10::str(targets[i].second.sizes()) + " when captured and " +
                                    c10::str(results[i].sizes()) + " on replay: a graph's shapes cannot depend on data.");
    at::Tensor target = targets[i].second;
    target.copy_(results[i]);
  }
}

at::IValue baked(const at::IValue& value, const Aliases& aliases) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  for (const auto& pair : aliases.pairs)
    if (pair.cpu.is_same(value.toTensor())) return value;
  return value.toTensor().clone();
}

std::function<void(int)> replayer(const Call& call, const Stack& cpu, std::vector<Target> targets) {
  Stack saved;
  for (const at::IValue& value : cpu) saved.push_back(baked(value, call.aliases));
  std::vector<const void*> known;
  for (auto& [device, storage] : call.aliases.storages) known.push_back(storage.unsafeGetStorageImpl());
  return [kernel = call.kernel, saved, targets = std::move(targets), known, name = call.info.name, site = call.site](int) {
    c10::InferenceMode inference;
    Stack stack = saved;
    run_cpu(kernel, stack);
    std::vector<at::Tensor> results;
    for (const at::IValue& value : stack) collect_fresh(value, known, results);
    deliver(results, targets, name, site);
  };
}

// Writes of fresh results belong to the operation that is already recorded.
void record_fresh(const std::vector<Target>& fresh, int actor, int op, int site) {
  Capture* capture = capturing(actor);
  uint64_t epoch = clock_of(actor).at(actor);
  for (const auto& [block, cpu] : fresh) {
    AccessMap& map = capture ? capture->maps[block->chunk.get()] : block->chunk->map;
    Range whole{0, block->size};
    Clash clash;
    if (map.clashes(whole, true, actor, clock_of(actor), &clash))
      violate("race", name_of(op) + " on " + actor_name(actor) + " at " + name_of(site) + " writes to memory reused from a freed block, which " +
                          name_of(clash.other.op) + " uses on " + actor_name(clash.other.actor) + " at " + name_of(clash.other.site) +
                          " with no ordering. Keep the tensor until the streams are joined.");
    map.record(whole, true, Use{actor, epoch, op, site});
    if (!capture) continue;
    capture->fixed[block->chunk.get()].record(whole, true, Use{actor, epoch, op, site});
    capture->blocks[block->id] = block;
  }
}

// The rows that an index operation touches are those of the indices at the time of the replay.
std::function<std::vector<Access>()> row_planner(const Call& call, const Stack& cpu) {
  at::Tensor rows = rows_wanted(call, cpu);
  for (const auto& pair : call.aliases.pairs) {
    BlockRef block = block_of(pair.device);
    if (!rows.defined() || !block || !pair.cpu.is_same(cpu[call.info.indexed].toTensor())) continue;
    return [rows, block, tensor = pair.cpu, write = pair.write] { return std::vector<Access>{{block, rows_of(tensor, rows, *block), write, true}}; };
  }
  return nullptr;
}

Node node_for(const Call& call, const Stack& cpu, const std::vector<Target>& fresh) {
  Node node;
  node.dynamic = row_planner(call, cpu);
  node.op = call.info.name;
  node.site = call.site;
  node.accesses = call.accesses;
  for (const auto& [block, tensor] : fresh) node.accesses.push_back({block, {{0, block->size}}, true});
  node.run = replayer(call, cpu, fresh);
  return node;
}

at::IValue zeroed(const at::IValue& value) {
  auto zero = [](const at::Tensor& tensor) {
    bool integral = tensor.defined() && c10::isIntegralType(tensor.scalar_type(), false);
    return integral ? at::zeros_like(tensor) : tensor;
  };
  if (value.isTensor()) return zero(value.toTensor());
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional<at::Tensor>(zero(*tensor)) : std::nullopt);
  return list;
}

// A capture computes nothing, so garbage in its integer inputs must not stop it: only the shapes of the results matter.
bool ran_on_zeros(Call& call, const Stack& cpu, Stack& stack) {
  stack.clear();
  for (size_t i = 0; i < cpu.size(); ++i) stack.push_back(call.info.writes[i] ? cpu[i] : zeroed(cpu[i]));
  try {
    run_cpu(call.kernel, stack);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void run_checked(Call& call, const Stack& cpu, Stack& stack, bool captured) {
  try {
    run_cpu(call.kernel, stack);
  } catch (const std::exception& error) {
    if (captured && ran_on_zeros(call, cpu, stack)) return;
    std::string text = error.what();
    bool bounds = text.find("out of bounds") != std::string::npos || text.find("out of range") != std::string::npos;
    if (call.info.index_args.empty() || !bounds) throw;
    violate("out_of_bounds", name_of(call.info.name) + " at " + name_of(call.site) + ": " + text.substr(0, text.find('\n')) + " (a device assertion on hardware)");
  }
}

void run_tracked(Call& call, const Stack& cpu, Stack& stack) {
  int actor = current_actor(call.device);
  bool captured;
  {
    Lock lock(state().mutex);
    captured = capturing(actor) != nullptr;
    check_waits(call, cpu, actor);
  }
  if (!captured)
    for (int position : call.info.index_args) check_indices(call, cpu[position]);
  plan_accesses(call, cpu, call.accesses);
  {
    Lock lock(state().mutex);
    touch(call.accesses, actor, call.info.name, call.site);
    count("ops");
    if (Capture* capture = capturing(actor)) save_for_undo(*capture, call.accesses);
  }
  run_checked(call, cpu, stack, captured);
  std::vector<Target> grown = propagate_resize(call.aliases), fresh;
  for (at::IValue& value : stack) value = give_back(call, value, fresh);
  Node node;
  if (captured) node = node_for(call, cpu, fresh);
  for (const auto& [block, tensor] : grown) node.accesses.push_back({block, {{0, block->size}}, true});
  Lock lock(state().mutex);
  record_fresh(fresh, actor, call.info.name, call.site);
  record_fresh(grown, actor, call.info.name, call.site);
  if (Capture* capture = capturing(actor)) capture->nodes.push_back(std::move(node));
}

void run_plain(Call& call, Stack& stack) {
  run_cpu(call.kernel, stack);
  propagate_resize(call.aliases);
  std::vector<Target> fresh;
  for (at::IValue& value : stack) value = give_back(call, value, fresh);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  guarded([&] {
    const Info& info = info_of(op);
    bool plain = info.view || untracked_depth() > 0;
    Call call{cpu_kernel(cpu_operator(op)), info};
    if (!plain) call.site = site_here();
    size_t arguments = op.schema().arguments().size(), first = stack->size() - arguments;
    for (size_t i = 0; i < arguments; ++i) find_device(call, (*stack)[first + i]);
    if (call.device < 0) call.device = current_device();
    Stack cpu;
    for (size_t i = 0; i < arguments; ++i) cpu.push_back(convert(call, (*stack)[first + i], static_cast<int>(i)));
    stack->resize(first);
    Stack results = cpu;
    plain ? run_plain(call, results) : run_tracked(call, cpu, results);
    stack->insert(stack->end(), results.begin(), results.end());
  });
}

}  // namespace

// A function over CPU tensors as one operation of the device: its results become blocks, its accesses are declared.
std::vector<at::Tensor> call(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<bool>& written, const Function& fn) {
  Info info{name_id(name)};
  info.writes = written;
  Kernel kernel = [fn](Stack& stack) {
    std::vector<at::Tensor> arguments;
    for (const at::IValue& value : stack) arguments.push_back(value.toTensor());
    stack.clear();
    for (const at::Tensor& result : fn(arguments)) stack.emplace_back(result);
  };
  Call call{kernel, info};
  call.site = site_here();
  Stack cpu;
  for (const at::Tensor& input : inputs) find_device(call, input);
  if (call.device < 0) call.device = current_device();
  for (size_t i = 0; i < inputs.size(); ++i) cpu.push_back(convert(call, inputs[i], static_cast<int>(i)));
  Stack results = cpu;
  untracked_depth() > 0 ? run_plain(call, results) : run_tracked(call, cpu, results);
  std::vector<at::Tensor> tensors;
  for (const at::IValue& value : results) tensors.push_back(value.toTensor());
  return tensors;
}

namespace {

// Operations with a CPU kernel and a generic one that would split them into several: ours sees them whole.
void register_whole(torch::Library& m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(state().key) || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    bool split = false;
    for (auto key : {c10::DispatchKey::CompositeExplicitAutogradNonFunctional, c10::DispatchKey::CompositeExplicitAutograd}) split |= op->hasKernelForDispatchKey(key);
    if (split) m.impl((name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

void register_ops() {
  static auto* everything = new torch::Library(torch::Library::IMPL, "_", state().key, __FILE__, __LINE__);
  everything->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", state().key, __FILE__, __LINE__);
  register_native(*aten);
  aten->impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  register_whole(*aten);
  if (state().key != c10::DispatchKey::PrivateUse1) return;
  static auto* autocast = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  autocast->fallback(torch::CppFunction::makeFallthrough());
}

void run_whole(const std::string& name) {
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", state().key, __FILE__, __LINE__);
  aten->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

}  // namespace sim
