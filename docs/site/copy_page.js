// The button at the top of a page copies its Markdown, which is in the page, so that it works offline.
document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy-page");
  if (!button) return;
  await navigator.clipboard.writeText(JSON.parse(document.getElementById("page-markdown").textContent));
  button.classList.add("copied");
  button.title = "Copied";
  setTimeout(() => {
    button.classList.remove("copied");
    button.title = button.getAttribute("aria-label");
  }, 2000);
});
