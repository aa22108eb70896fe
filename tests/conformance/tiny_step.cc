// SPDX-License-Identifier: Apache-2.0

#include "tests/conformance/tiny_step.h"

#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/state/assembler.h"
#include "formats/torch/pickle_writer.h"
#include "tests/formats/dcp/dcp_maker.h"

namespace ckptfs {
namespace {

constexpr uint64_t kHidden = 8;
constexpr uint64_t kVocabulary = 13;

std::string NewDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "ckptfs_tiny_XXXXXX").string();
  CKPT_CHECK(mkdtemp(name.data()) != nullptr);
  return name;
}

std::vector<Parameter> Parameters(const TinyStepOptions& options) {
  std::vector<Parameter> list;
  const auto add = [&](std::string name, Shape shape, Pattern pattern, StageRule stage,
                       uint32_t layer = 0, Role role = Role::kTrainable) {
    Parameter parameter;
    parameter.name = std::move(name);
    parameter.shape = std::move(shape);
    parameter.pattern = std::move(pattern);
    parameter.stage = stage;
    parameter.layer = layer;
    parameter.role = role;
    list.push_back(std::move(parameter));
  };
  Pattern vocabulary = Pattern::Shard(0);
  vocabulary.cuts[0].pad_multiple = 4;
  add("embed.weight", {kVocabulary, kHidden}, vocabulary, StageRule::kFirst);
  add("temperature", {}, Pattern::Replicate(), StageRule::kLast);
  add("empty", {0, kHidden}, Pattern::Replicate(), StageRule::kLast);
  for (uint32_t i = 0; i < options.layers; ++i) {
    const std::string at = StrCat(options.megatron ? "decoder.layers." : "layers.", i, ".");
    const auto layer = StageRule::kLayer;
    add(at + "norm.weight", {kHidden}, Pattern::Replicate(), layer, i);
    add(at + "qkv.weight", {16, kHidden}, Pattern::Shard(0, {8, 4, 4}), layer, i);
    add(at + "out.weight", {kHidden, 8}, Pattern::Shard(1), layer, i);
    add(at + "gate_up.weight", {24, kHidden}, Pattern::Shard(0, {12, 12}), layer, i);
    add(at + "out.bias", {kHidden}, Pattern::Replicate(), layer, i, Role::kFrozen);
    add(at + "freq", {3}, Pattern::Replicate(), layer, i, Role::kBuffer);
    if (options.megatron && options.experts > 0) {
      add(at + "mlp.experts.experts.linear_fc1.weight", {options.experts, 6, kHidden},
          Pattern::Shard(1, {3, 3}), layer, i);
      list.back().stacked_experts = options.experts;
    }
    for (uint32_t e = 0; e < options.experts && !options.megatron; ++e) {
      add(StrCat(at, "deepspeed_experts.", e, ".weight"), {5, kHidden}, Pattern::Replicate(), layer,
          i);
      list.back().expert = e;
      list.back().expert_at = static_cast<uint32_t>(at.size() + sizeof("deepspeed_experts.") - 1);
    }
  }
  return list;
}

// fp32 values of an atom, stored as `dtype`.
std::string Stored(AtomIndex atom, uint64_t elements, DType dtype) {
  std::string bytes;
  for (uint64_t i = 0; i < elements; ++i) {
    const float value = TinyStep::Value(atom, i);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    char raw[4];
    std::memcpy(raw, &bits, sizeof(raw));
    if (dtype == DType::kF32) bytes.append(raw, 4);
    if (dtype == DType::kBF16) {
      bits += 0x7fff + ((bits >> 16) & 1);  // to nearest even
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(raw, &half, sizeof(half));
      bytes.append(raw, 2);
    }
  }
  return bytes;
}

std::string HyperParameters(double rate, double decay, bool megatron) {
  PickleBuilder builder;
  const NodeId betas = builder.Tuple({builder.Float(0.9), builder.Float(0.95)});
  std::vector<std::pair<NodeId, NodeId>> items = {
      {builder.String("lr"), builder.Float(rate)},
      {builder.String("betas"), betas},
      {builder.String("weight_decay"), builder.Float(decay)}};
  if (megatron) {
    items.emplace_back(builder.String("lr_mult"), builder.Float(1.0));
    items.emplace_back(builder.String("is_decoupled_lr"), builder.Bool(false));
  }
  const NodeId root = builder.Dict(items);
  return PrintPickle(std::move(builder).Finish(root)).value();
}

std::string PickledInt(int64_t value) {
  PickleBuilder builder;
  const NodeId root = builder.Int(value);
  return PrintPickle(std::move(builder).Finish(root)).value();
}

std::string Configuration() {
  PickleBuilder builder;
  const NodeId zero = builder.Dict({{builder.String("round_robin_gradients"), builder.Bool(true)},
                                    {builder.String("sub_group_size"), builder.Int(60)}});
  const NodeId enabled = builder.Dict({{builder.String("enabled"), builder.Bool(true)}});
  const NodeId root = builder.Dict(
      {{builder.String("bf16"), enabled}, {builder.String("zero_optimization"), zero}});
  return PrintPickle(std::move(builder).Finish(root)).value();
}

// Adds atoms and writes their bytes one after the other into one file.
class Filler {
 public:
  Filler(Assembler& assembler, std::ofstream& file) : assembler_(assembler), file_(file) {}

  void Add(ParameterIndex parameter, const std::string& kind, DType dtype, const Shape& shape) {
    const AtomIndex atom = assembler_.AddAtom(parameter, "", kind, dtype, shape).value();
    const uint64_t elements = ElementCount(shape).value();
    const std::string bytes = Stored(atom, elements, dtype);
    const uint32_t local = assembler_.AddLocal(atom, 0, WholeTensor(shape));
    assembler_.AddFragment(atom, 0, local, {0, elements, BlobIndex{0}, offset_, dtype});
    file_ << bytes;
    offset_ += bytes.size();
  }

  void AddStep(ParameterIndex parameter, bool python) {
    const DType dtype = python ? DType::kI64 : DType::kF32;
    const AtomIndex atom =
        assembler_.AddAtom(parameter, "", "step", dtype, {}, Relation::kScalar).value();
    const int64_t whole = 5;
    const float real = 5;
    std::string bytes(python ? 8 : 4, '\0');
    std::memcpy(bytes.data(), python ? static_cast<const void*>(&whole) : &real, bytes.size());
    CKPT_CHECK(assembler_.SetInline(atom, bytes, python).has_value());
  }

 private:
  Assembler& assembler_;
  std::ofstream& file_;
  uint64_t offset_ = 0;
};

void FillParameter(Filler& filler, const TinyStepOptions& options, const Parameter& parameter,
                   ParameterIndex index, bool lazy) {
  const bool trainable = parameter.role == Role::kTrainable;
  if (parameter.role == Role::kBuffer) {
    filler.Add(index, "weight", DType::kF32, parameter.shape);
    return;
  }
  if (options.weights || !trainable) filler.Add(index, "weight", DType::kBF16, parameter.shape);
  if (!trainable) return;
  filler.Add(index, "master", DType::kF32, parameter.shape);
  if (lazy) return;
  filler.Add(index, "exp_avg", DType::kF32, parameter.shape);
  filler.Add(index, "exp_avg_sq", DType::kF32, parameter.shape);
  filler.AddStep(index, options.python_step);
}

void AddGroups(Assembler& assembler, const TinyStepOptions& options,
               const std::vector<Parameter>& parameters) {
  std::vector<Group> groups(options.groups);
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].role != Role::kTrainable) continue;
    const bool second = options.groups > 1 && parameters[i].shape.size() < 2;
    groups[second ? 1 : 0].parameters.push_back(ParameterIndex{i});
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].hyper_parameters = HyperParameters(0.01, g == 0 ? 0.1 : 0.0, options.megatron);
    assembler.AddGroup(groups[g]);
  }
}

// Adds the files that a training tool writes around a step, and the document that says so.
void AddTool(Assembler& assembler, uint32_t root, const std::string& directory,
             const std::string& tool) {
  std::filesystem::create_directory(directory + "/more");
  for (const std::string name : {"latest", "more/notes.txt", "scheduler.bin", "scheduler.pt"}) {
    std::ofstream(directory + "/" + name)
        << (name.ends_with(".pt") ? dcp::NumberArchive(7) : StrCat("of ", tool, ": ", name));
    CKPT_CHECK(assembler.AddFile(root, name).has_value());
  }
  assembler.header().facts.tool = {tool, ""};
}

}  // namespace

TinyStep::TinyStep(const TinyStepOptions& options) : directory_(NewDirectory()) {
  Assembler assembler;
  const auto parameters = Parameters(options);
  const std::string path = directory_ + "/data.bin";
  {
    // The file must exist before it is registered: contents first, twice the
    // same way, so that stamps are of the finished file.
    Assembler dry;
    std::ofstream file(path, std::ios::binary);
    dry.AddBlob(Blob{});
    Filler filler(dry, file);
    for (uint32_t i = 0; i < parameters.size(); ++i) {
      const ParameterIndex index = dry.AddParameter(parameters[i]).value();
      FillParameter(filler, options, parameters[i], index, options.lazy_state && i == 3);
    }
  }
  const uint32_t root = assembler.AddRoot(std::make_shared<FileRoot>(directory_));
  CKPT_CHECK(assembler.AddFile(root, "data.bin").value() == BlobIndex{0});
  std::ofstream nowhere;
  Filler filler(assembler, nowhere);
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    const ParameterIndex index = assembler.AddParameter(parameters[i]).value();
    FillParameter(filler, options, parameters[i], index, options.lazy_state && i == 3);
  }
  assembler.AddAlias("head.weight", ParameterIndex{0});
  AddGroups(assembler, options, parameters);
  StepModel& header = assembler.header();
  header.framework = options.megatron ? "megatron" : "deepspeed";
  header.id = "global_step5";
  header.iteration = 5;
  header.layers = options.layers;
  header.model_dtype = DType::kBF16;
  header.documents.push_back({"global_steps", "", PickledInt(5), {}});
  header.documents.push_back({"client/iteration", "", PickledInt(5), {}});
  if (options.configured) {
    header.layout.tp = 2;
    header.documents.push_back({"ds_config", "", Configuration(), {}});
  }
  if (!options.tool.empty()) AddTool(assembler, root, directory_, options.tool);
  auto model = std::move(assembler).Finish();
  if (!model) CheckFailed(model.error().message.c_str(), __FILE__, __LINE__);
  model_ = std::make_shared<StepModel>(*std::move(model));
  blobs_ = BlobReader::Create(*model_, BlobReader::Options{});
}

TinyStep::~TinyStep() {
  blobs_.reset();
  std::filesystem::remove_all(directory_);
}

}  // namespace ckptfs
