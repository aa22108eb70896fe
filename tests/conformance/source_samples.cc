// SPDX-License-Identifier: Apache-2.0

#include "tests/conformance/source_samples.h"

#include <filesystem>
#include <fstream>
#include <map>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/export/export.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "formats/torch/archive_builder.h"
#include "tests/conformance/tiny_step.h"
#include "tests/formats/dcp/dcp_maker.h"
#include "tests/formats/megatron/legacy_maker.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;

constexpr uint64_t kHugeElements = uint64_t{1} << 38;  // a TiB of fp32

// The value, or the end of the test program.
template <class T>
T Must(Result<T> result) {
  if (!result) CheckFailed(result.error().message.c_str(), __FILE__, __LINE__);
  return *std::move(result);
}

StepModel ReadGolden(const std::string& save) {
  const FamilySet families = Must(ShippedFamilies());
  SourceOptions options;
  options.families = &families;
  const auto sources = MakeSources();
  return std::move(Must(IngestPlace(Must(PlaceOf(save)), sources, options)).steps.front().model);
}

SourceSample Export(const StepModel& step, const std::string& layout, const std::string& to) {
  const auto blobs = BlobReader::Create(step, BlobReader::Options{});
  const auto views = ViewSet::Open(std::make_shared<const StepModel>(step),
                                   Must(Layout::Parse(layout)), MakeViewFormats());
  Must(ExportView(*views, "deepspeed", to, "sample", *blobs, ExportAccess{}, JobOptions{}));
  return {to, StrCat(to, "/", step.id), {"zero/optimizer_state.pt"}};
}

// A file whose zeros are holes.
void WriteHoles(const std::string& path, ArchiveContent content) {
  const Plan plan = Must(std::move(content).MakePlan(files::path(path).stem().string()));
  files::create_directories(files::path(path).parent_path());
  std::ofstream out(path, std::ios::binary);
  for (const Segment& segment : plan.segments()) {
    const auto* literal = std::get_if<LiteralSegment>(&segment.body);
    if (literal == nullptr) continue;
    out.seekp(static_cast<std::streamoff>(segment.begin));
    out << *literal->bytes;
  }
  out.close();
  files::resize_file(path, plan.size());
}

ArchiveContent HugeState() {
  ArchiveBuilder archive;
  const uint64_t bytes = kHugeElements * 4;
  const NodeId tensor = Must(
      archive.Tensor(DType::kF32, {kHugeElements / 1024, 1024}, {{bytes, ZeroSegment{bytes}}}));
  const NodeId dict = archive.pickle().Dict({{archive.pickle().String("param"), tensor}});
  return std::move(archive).Finish(dict);
}

ArchiveContent Numbers(const std::map<std::string, int64_t>& numbers) {
  ArchiveBuilder archive;
  PickleBuilder& pickle = archive.pickle();
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, value] : numbers) {
    const NodeId name = pickle.String(key);
    items.emplace_back(name, pickle.Int(value));
  }
  const NodeId dict = pickle.Dict(items);
  return std::move(archive).Finish(dict);
}

}  // namespace

SourceSample WriteDeepSpeedGolden(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  files::copy(CKPTFS_TEST_DATA "/golden/deepspeed_tiny/ckpt", save, files::copy_options::recursive);
  SourceSample out{save, StrCat(save, "/global_step3"), {}};
  for (const auto& entry : files::directory_iterator(out.tag)) {
    out.needed.push_back(entry.path().filename().string());
  }
  return out;
}

SourceSample WriteRankShards(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string golden = CKPTFS_TEST_DATA "/golden/rank_shards/torch_2_13";
  files::create_directories(save);
  // The SFT trainer's step: no folder for each model.
  files::copy(StrCat(golden, "/global_step_3/actor"), StrCat(save, "/global_step_3"),
              files::copy_options::recursive);
  const char* tracker = "latest_checkpointed_iteration.txt";
  files::copy(StrCat(golden, "/", tracker), StrCat(save, "/", tracker));
  SourceSample out{save, StrCat(save, "/global_step_3"), {}};
  for (const char* kind : {"model", "optim"}) {
    for (const char* rank : {"0", "1"}) {
      out.needed.push_back(StrCat(kind, "_world_size_2_rank_", rank, ".pt"));
    }
  }
  return out;
}

SourceSample WriteUniversalOfGolden(const std::string& directory) {
  const StepModel golden = ReadGolden(CKPTFS_TEST_DATA "/golden/deepspeed_tiny/ckpt");
  return Export(golden, "tp2_dp2_zero1", StrCat(directory, "/run"));
}

SourceSample WriteUniversalOfTinyStep(const std::string& directory) {
  TinyStepOptions options;
  options.groups = 2;
  options.lazy_state = true;
  options.python_step = true;
  const TinyStep step(options);
  return Export(step.model(), "dp2_zero1", StrCat(directory, "/run"));
}

SourceSample WriteUniversalOfHoles(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string tag = StrCat(save, "/global_step7");
  WriteHoles(StrCat(tag, "/zero/big.weight/fp32.pt"), HugeState());
  WriteHoles(StrCat(tag, "/zero/big.weight/exp_avg.pt"), HugeState());
  WriteHoles(StrCat(tag, "/zero/optimizer_state.pt"), Numbers({{"zero_stage", 1}}));
  WriteHoles(StrCat(tag, "/mp_rank_00_model_states.pt"),
             Numbers({{"dp_world_size", 1}, {"global_steps", 7}, {"mp_world_size", 1}}));
  std::ofstream(StrCat(save, "/latest_universal")) << "global_step7";
  return {save, tag, {"zero/optimizer_state.pt", "mp_rank_00_model_states.pt"}};
}

SourceSample WriteUniversalWithoutAFolder(const std::string& directory) {
  SourceSample out = WriteUniversalOfHoles(directory);
  ArchiveBuilder optimizer;
  PickleBuilder& pickle = optimizer.pickle();
  const NodeId step = pickle.Dict({{pickle.String("step"), pickle.Int(7)}});
  const NodeId state =
      pickle.Dict({{pickle.String("state"), pickle.Dict({{pickle.Int(0), step}})}});
  const NodeId root = pickle.Dict({{pickle.String("fp32_flat_groups"), pickle.List({})},
                                   {pickle.String("optimizer_state_dict"), state}});
  WriteHoles(StrCat(out.tag, "/zero/optimizer_state.pt"), std::move(optimizer).Finish(root));
  ArchiveBuilder model;
  PickleBuilder& text = model.pickle();
  const NodeId shapes =
      text.OrderedDict({{text.String("big.weight"), text.Size({kHugeElements / 1024, 1024})},
                        {text.String("gone.weight"), text.Size({4})}});
  const NodeId numbers = text.Dict({{text.String("dp_world_size"), text.Int(1)},
                                    {text.String("mp_world_size"), text.Int(1)},
                                    {text.String("global_steps"), text.Int(7)},
                                    {text.String("param_shapes"), text.List({shapes})}});
  WriteHoles(StrCat(out.tag, "/mp_rank_00_model_states.pt"), std::move(model).Finish(numbers));
  return out;
}

SourceSample WriteHuggingFace(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string tag = StrCat(save, "/checkpoint-3");
  files::create_directories(tag);
  for (const std::string part : {"a", "b"}) {
    std::vector<SafetensorsEntry> entries{{part + ".weight", DType::kF32, {64, 256}},
                                          {part + ".bias", DType::kBF16, {256}}};
    std::ofstream out(StrCat(tag, "/", part, ".safetensors"), std::ios::binary);
    out << Must(RenderSafetensorsHeader({{"format", "pt"}}, entries))
        << std::string(entries.back().end, 'w');
  }
  std::ofstream(StrCat(tag, "/model.safetensors.index.json"))
      << R"({"metadata": {}, "weight_map": {"a.weight": "a.safetensors", "a.bias": "a.safetensors",)"
      << R"("b.weight": "b.safetensors", "b.bias": "b.safetensors"}})";
  std::ofstream(StrCat(tag, "/config.json")) << R"({"model_type": "none"})";
  std::ofstream(StrCat(tag, "/trainer_state.json")) << "{}";
  return {save, tag, {"a.safetensors", "b.safetensors"}};
}

SourceSample WriteDcp(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string tag = StrCat(save, "/step-3");
  files::create_directories(tag);
  dcp::DcpMaker made;
  const std::string first = "__0_0.distcp", second = "__1_0.distcp";
  made.AddTensor("model.a.weight", {64, 256}, 1,
                 {{{0, 0}, {32, 256}, first}, {{32, 0}, {32, 256}, second}}, {"model", "a.weight"});
  made.AddTensor("model.b.bias", {4096}, 2, {{{0}, {4096}, second}}, {"model", "b.bias"});
  for (const auto& [name, bytes] : made.files) {
    std::ofstream(StrCat(tag, "/", name), std::ios::binary) << bytes;
  }
  std::ofstream(StrCat(tag, "/.metadata"), std::ios::binary) << made.Metadata();
  return {save, tag, {".metadata"}};
}

SourceSample WriteMegatron(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string tag = StrCat(save, "/iter_0000003");
  files::create_directories(tag);
  dcp::DcpMaker made;
  const std::string first = "__0_0.distcp", second = "__1_0.distcp";
  made.AddTensor("embedding.word_embeddings.weight", {64, 256}, 1,
                 {{{0, 0}, {32, 256}, first}, {{32, 0}, {32, 256}, second}});
  made.AddTensor("decoder.layers.mlp.linear_fc1.weight", {2, 64, 256}, 2,
                 {{{0, 0, 0}, {1, 64, 256}, first}, {{1, 0, 0}, {1, 64, 256}, second}});
  PickleBuilder common;
  const NodeId layers = common.Dict({{common.String("num_layers"), common.Int(2)}});
  const NodeId arguments =
      common.Object(common.Global("argparse", "Namespace"), common.Tuple({}), layers);
  const NodeId state = common.Dict({{common.String("args"), arguments}});
  made.files["common.pt"] = dcp::ObjectArchive(std::move(common).Finish(state));
  for (const auto& [name, bytes] : made.files) {
    std::ofstream(StrCat(tag, "/", name), std::ios::binary) << bytes;
  }
  std::ofstream(StrCat(tag, "/.metadata"), std::ios::binary) << made.Metadata();
  std::ofstream(StrCat(tag, "/metadata.json"))
      << R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})";
  std::ofstream(StrCat(save, "/latest_checkpointed_iteration.txt")) << "3";
  return {save, tag, {".metadata", "metadata.json"}};
}

SourceSample WriteMegatronLegacy(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string tag = StrCat(save, "/iter_0000003");
  SourceSample out{save, tag, {}};
  for (const int rank : {0, 1}) {
    const std::string folder = StrCat("mp_rank_0", rank);
    megatron::MadeRank made;
    made.args = {{"tensor_model_parallel_size", 2},
                 {"pipeline_model_parallel_size", 1},
                 {"num_layers", 1},
                 {"world_size", 2},
                 {"rank", rank}};
    const auto first = static_cast<float>(rank) * 8192;
    made.model = {{"embedding.word_embeddings.weight", {32, 256}, first},
                  {"decoder.layers.0.mlp.linear_fc1.weight", {32, 256}, first},
                  {"decoder.layers.0.mlp.linear_fc2.weight", {256, 32}, first}};
    files::create_directories(StrCat(tag, "/", folder));
    out.needed.push_back(StrCat(folder, "/model_optim_rng.pt"));
    std::ofstream(StrCat(tag, "/", out.needed.back()), std::ios::binary) << megatron::FileOf(made);
  }
  std::ofstream(StrCat(save, "/latest_checkpointed_iteration.txt")) << "3";
  return out;
}

SourceSample WriteFake(const std::string& directory) {
  const std::string save = StrCat(directory, "/run");
  const std::string tag = StrCat(save, "/step4");
  files::create_directories(tag);
  std::ofstream(StrCat(tag, "/data")) << std::string(65536, 'x');
  std::ofstream(StrCat(tag, "/done")) << "module.layer.weight 16000 data 0\n"
                                         "bias 384 data 64000\n";
  return {save, tag, {"done"}};
}

}  // namespace ckptfs
