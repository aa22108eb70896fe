# cmake -DOUTPUT=FILE -DNAMES=module_names.txt -P embed.cmake: the text as a C++ source.
file(READ ${NAMES} text)
file(WRITE ${OUTPUT}.new "// Made from formats/huggingface/module_names.txt.
#include \"formats/huggingface/module_names.h\"

namespace ckptfs::huggingface {

std::string_view ModuleNamesText() {
  static constexpr char text[] = R\"names(${text})names\";
  return {text, sizeof text - 1};
}

}  // namespace ckptfs::huggingface
")
file(RENAME ${OUTPUT}.new ${OUTPUT})
